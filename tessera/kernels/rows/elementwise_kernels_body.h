// The loops of elementwise_kernels.cc, which includes this file once for each set of vector instructions.

struct Sigmoid {
  Lanes of, value;  // x, its sigmoid
  explicit Sigmoid(Lanes x) : of(x), value(div(fill(1), add(fill(1), exp_lanes(sub(fill(0), x))))) {}
};

struct SiluLanes {
  Lanes value, slope;
  explicit SiluLanes(Lanes x) {
    const Sigmoid s(x);
    value = mul(x, s.value);
    slope = fma(value, sub(fill(1), s.value), s.value);
  }
};

// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3). This equals x times sigmoid(2 u).
struct GeluLanes {
  Lanes value, slope;
  explicit GeluLanes(Lanes x) {
    constexpr float kTwice = 1.5957691216F, kCube = 0.044715F;
    const Lanes square = mul(x, x);
    const Lanes twice = mul(mul(x, fill(kTwice)), fma(square, fill(kCube), fill(1)));
    const Sigmoid s(twice);
    value = mul(x, s.value);
    const Lanes inner = fma(square, fill(3 * kCube * kTwice), fill(kTwice));
    slope = fma(mul(value, sub(fill(1), s.value)), inner, s.value);
  }
};

template <class Lane, class T>
void gate_lanes(const T* gate, const T* up, T* to) {
  store_lanes(to, mul(rounded_to<T>(Lane(load_lanes(gate)).value), load_lanes(up)));
}

template <class Lane, class T>
void gate_backward_lanes(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up) {
  const Lane lane(load_lanes(gate));
  const Lanes g = load_lanes(grad);
  store_lanes(grad_gate, mul(mul(g, load_lanes(up)), lane.slope));
  store_lanes(grad_up, mul(g, lane.value));
}

// Computes elements [begin, end). The last elements, which do not fill a vector, are copied to a buffer of one vector.
template <class Lane, class T>
void gate_elements(const T* gate, const T* up, T* to, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) gate_lanes<Lane>(gate + i, up + i, to + i);
  if (i == end) return;
  T tail[3][kLanes] = {};
  std::copy(gate + i, gate + end, tail[0]);
  std::copy(up + i, up + end, tail[1]);
  gate_lanes<Lane>(tail[0], tail[1], tail[2]);
  std::copy(tail[2], tail[2] + (end - i), to + i);
}

template <class Lane, class T>
void gate_backward_elements(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t begin,
                            int64_t end) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    gate_backward_lanes<Lane>(grad + i, gate + i, up + i, grad_gate + i, grad_up + i);
  }
  if (i == end) return;
  T tail[5][kLanes] = {};
  std::copy(grad + i, grad + end, tail[0]);
  std::copy(gate + i, gate + end, tail[1]);
  std::copy(up + i, up + end, tail[2]);
  gate_backward_lanes<Lane>(tail[0], tail[1], tail[2], tail[3], tail[4]);
  std::copy(tail[3], tail[3] + (end - i), grad_gate + i);
  std::copy(tail[4], tail[4] + (end - i), grad_up + i);
}

template <class T>
void gate_range(Gate kind, const T* gate, const T* up, T* to, int64_t begin, int64_t end) {
  kind == Gate::kSilu ? gate_elements<SiluLanes>(gate, up, to, begin, end)
                      : gate_elements<GeluLanes>(gate, up, to, begin, end);
}

template <class T>
void gate_backward_range(Gate kind, const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t begin,
                         int64_t end) {
  kind == Gate::kSilu ? gate_backward_elements<SiluLanes>(grad, gate, up, grad_gate, grad_up, begin, end)
                      : gate_backward_elements<GeluLanes>(grad, gate, up, grad_gate, grad_up, begin, end);
}

template <class T>
void norm_row(const T* from, const float* factors, int64_t width, float eps, bool rounds_first, T* to, float& inverse) {
  Lanes squares = fill(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes x = load_lanes(from + i);
    squares = fma(x, x, squares);
  }
  inverse = 1.0F / std::sqrt(sum_of(squares) / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; i += kLanes) {
    Lanes normed = mul(load_lanes(from + i), fill(inverse));
    if (rounds_first) normed = rounded_to<T>(normed);
    store_lanes(to + i, mul(load_lanes(factors + i), normed));
  }
}

// With g = grad, f = factors and n = x * inverse: writes grad_x = inverse * (g f - n mean(g f n)) to `to` and adds g n
// to `sums`.
template <class T>
void norm_row_backward(const T* grad, const T* x, const float* factors, int64_t width, float inverse, T* to,
                       float* sums) {
  Lanes dots = fill(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes scaled = mul(load_lanes(grad + i), load_lanes(factors + i));
    dots = fma(scaled, load_lanes(x + i), dots);
  }
  const float mean_gradient = sum_of(dots) * inverse * inverse / static_cast<float>(width);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes g = load_lanes(grad + i), from = load_lanes(x + i);
    const Lanes scaled = mul(g, load_lanes(factors + i));
    store_lanes(to + i, mul(fill(inverse), fnma(from, fill(mean_gradient), scaled)));
    store_lanes(sums + i, fma(mul(g, from), fill(inverse), load_lanes(sums + i)));
  }
}

template <class T>
void rotate_head(const T* from, const float* cos, const float* sin, float sign, int64_t half, T* to) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const Lanes low = load_lanes(from + i), high = load_lanes(from + half + i);
    const Lanes c = load_lanes(cos + i), s = mul(fill(sign), load_lanes(sin + i));
    store_lanes(to + i, fnma(high, s, mul(low, c)));
    store_lanes(to + half + i, fma(low, s, mul(high, c)));
  }
}

// Returns the row's loss. With wants_gradient, replaces the row by softmax - onehot(label). Three passes: the maximum,
// the sum of exponentials, the division. max() may lose a NaN, so NaN is tracked separately and makes the loss NaN.
inline float softmax_cross_entropy_row(float* logits, int64_t classes, int64_t label, bool wants_gradient) {
  const Lanes least = fill(-std::numeric_limits<float>::infinity());
  Lanes peaks = least;
  bool has_nan = false;
  for_each_lanes(classes, [&](int64_t at, auto lanes) {
    const Lanes x = load_lanes(lanes, logits + at, least);
    has_nan |= any(not_numbers(x));
    peaks = max(peaks, x);
  });
  const float maximum = has_nan ? std::numeric_limits<float>::quiet_NaN() : largest_of(peaks);
  const float own = logits[label] - maximum;
  Lanes sums = fill(0);
  for_each_lanes(classes, [&](int64_t at, auto lanes) {
    const Lanes power = exp_lanes(sub(load_lanes(lanes, logits + at, least), fill(maximum)));
    sums = add(sums, select(lanes, power, fill(0)));
    if (wants_gradient) store_lanes(lanes, logits + at, power);
  });
  const float sum = sum_of(sums);
  if (wants_gradient) {
    const Lanes factor = fill(1 / sum);
    for_each_lanes(classes, [&](int64_t at, auto lanes) {
      store_lanes(lanes, logits + at, mul(load_lanes(lanes, logits + at, fill(0)), factor));
    });
    logits[label] -= 1;
  }
  return std::log(sum) - own;
}

// Writes rows [begin, end) of the transposed matrix, which has `rows` columns. Both counts are multiples of kLanes.
inline void transpose_rows(const float* from, int64_t from_row, int64_t rows, float* to, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += kLanes) {
    for (int64_t row = 0; row < rows; row += kLanes) {
      Lanes square[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) square[i] = load_lanes(from + (row + i) * from_row + column);
      transpose(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) store_lanes(to + (column + i) * rows + row, square[i]);
    }
  }
}
