#include "tessera/kernels/detail/row_loops.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/kernels/cuda/row_twins.h"
#include "tessera/kernels/detail/lanes.h"

namespace tessera::detail {

bool has_row_loops(c10::Device device, at::ScalarType type) {
  if (device.is_cuda()) return cuda::has_row_twins(type);
  return device.is_cpu() && (type == at::kFloat || type == at::kBFloat16) && has_lanes();
}

bool runs_row_loops(const at::Tensor& tensor, int64_t lanes) {
  return has_row_loops(tensor.device(), tensor.scalar_type()) && tensor.numel() > 0 &&
         (!tensor.is_cpu() || lanes == 1 || tensor.size(-1) % lanes == 0);
}

#ifdef TESSERA_HAS_LANES
namespace {

constexpr int64_t kLoopElements = 1 << 14;  // a thread's least share of work

int64_t rows_at_once(int64_t width) { return std::max<int64_t>(1, kLoopElements / width); }

template <class Run>
void for_dtype_of(const at::Tensor& tensor, const Run& run) {
  tensor.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of what GCC 12's own headers leave undefined
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

inline Lanes all(float value) { return _mm512_set1_ps(value); }

struct Sigmoid {
  Lanes of, value;  // x, its sigmoid
  explicit Sigmoid(Lanes x)
      : of(x), value(_mm512_div_ps(all(1), _mm512_add_ps(all(1), exp_lanes(_mm512_sub_ps(all(0), x))))) {}
};

struct SiluLanes {
  Lanes value, slope;
  explicit SiluLanes(Lanes x) {
    const Sigmoid s(x);
    value = _mm512_mul_ps(x, s.value);
    slope = _mm512_fmadd_ps(value, _mm512_sub_ps(all(1), s.value), s.value);
  }
};

// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x times the sigmoid of 2 u.
struct GeluLanes {
  Lanes value, slope;
  explicit GeluLanes(Lanes x) {
    constexpr float kTwice = 1.5957691216F, kCube = 0.044715F;
    const Lanes square = _mm512_mul_ps(x, x);
    const Lanes twice = _mm512_mul_ps(_mm512_mul_ps(x, all(kTwice)), _mm512_fmadd_ps(square, all(kCube), all(1)));
    const Sigmoid s(twice);
    value = _mm512_mul_ps(x, s.value);
    const Lanes inner = _mm512_fmadd_ps(square, all(3 * kCube * kTwice), all(kTwice));
    slope = _mm512_fmadd_ps(_mm512_mul_ps(value, _mm512_sub_ps(all(1), s.value)), inner, s.value);
  }
};

template <class Lane, class T>
void gate_lanes(const T* gate, const T* up, T* to) {
  store_lanes(to, _mm512_mul_ps(rounded_to<T>(Lane(load_lanes(gate)).value), load_lanes(up)));
}

template <class Lane, class T>
void gate_backward_lanes(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up) {
  const Lane lane(load_lanes(gate));
  const Lanes g = load_lanes(grad);
  store_lanes(grad_gate, _mm512_mul_ps(_mm512_mul_ps(g, load_lanes(up)), lane.slope));
  store_lanes(grad_up, _mm512_mul_ps(g, lane.value));
}

// Elements [begin, end); what is left over goes through memory of the size of lanes.
template <class Lane, class T>
void gate_range(const T* gate, const T* up, T* to, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) gate_lanes<Lane>(gate + i, up + i, to + i);
  if (i == end) return;
  T rest[3][kLanes] = {};
  std::copy(gate + i, gate + end, rest[0]);
  std::copy(up + i, up + end, rest[1]);
  gate_lanes<Lane>(rest[0], rest[1], rest[2]);
  std::copy(rest[2], rest[2] + (end - i), to + i);
}

template <class Lane, class T>
void gate_backward_range(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t begin,
                         int64_t end) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    gate_backward_lanes<Lane>(grad + i, gate + i, up + i, grad_gate + i, grad_up + i);
  }
  if (i == end) return;
  T rest[5][kLanes] = {};
  std::copy(grad + i, grad + end, rest[0]);
  std::copy(gate + i, gate + end, rest[1]);
  std::copy(up + i, up + end, rest[2]);
  gate_backward_lanes<Lane>(rest[0], rest[1], rest[2], rest[3], rest[4]);
  std::copy(rest[3], rest[3] + (end - i), grad_gate + i);
  std::copy(rest[4], rest[4] + (end - i), grad_up + i);
}

template <class T>
void norm_row(const T* from, const float* factors, int64_t width, float eps, bool rounds_first, T* to, float& inverse) {
  Lanes squares = all(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes x = load_lanes(from + i);
    squares = _mm512_fmadd_ps(x, x, squares);
  }
  inverse = 1.0F / std::sqrt(sum_of(squares) / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; i += kLanes) {
    Lanes normed = _mm512_mul_ps(load_lanes(from + i), all(inverse));
    if (rounds_first) normed = rounded_to<T>(normed);
    store_lanes(to + i, _mm512_mul_ps(load_lanes(factors + i), normed));
  }
}

// With n = x * inverse: grad_x = inverse * (g f - n mean(g f n)), and g n is added to the sums.
template <class T>
void norm_row_backward(const T* grad, const T* x, const float* factors, int64_t width, float inverse, T* to,
                       float* sums) {
  Lanes dots = all(0);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes scaled = _mm512_mul_ps(load_lanes(grad + i), load_lanes(factors + i));
    dots = _mm512_fmadd_ps(scaled, load_lanes(x + i), dots);
  }
  const float pull = sum_of(dots) * inverse * inverse / static_cast<float>(width);
  for (int64_t i = 0; i < width; i += kLanes) {
    const Lanes g = load_lanes(grad + i), from = load_lanes(x + i);
    const Lanes scaled = _mm512_mul_ps(g, load_lanes(factors + i));
    store_lanes(to + i, _mm512_mul_ps(all(inverse), _mm512_fnmadd_ps(from, all(pull), scaled)));
    store_lanes(sums + i, _mm512_fmadd_ps(_mm512_mul_ps(g, from), all(inverse), load_lanes(sums + i)));
  }
}

template <class T>
void rotate_head(const T* from, const float* cos, const float* sin, float sign, int64_t half, T* to) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const Lanes low = load_lanes(from + i), high = load_lanes(from + half + i);
    const Lanes c = load_lanes(cos + i), s = _mm512_mul_ps(all(sign), load_lanes(sin + i));
    store_lanes(to + i, _mm512_fnmadd_ps(high, s, _mm512_mul_ps(low, c)));
    store_lanes(to + half + i, _mm512_fmadd_ps(low, s, _mm512_mul_ps(high, c)));
  }
}

// Returns the loss of the row.
float soften_row(float* logits, int64_t classes, int64_t label, bool wants_gradient) {
  const auto lanes_at = [classes](int64_t i) { return first_lanes(classes - i); };
  const Lanes least = all(-std::numeric_limits<float>::infinity());
  Lanes peaks = least;
  __mmask16 nan = 0;
  for (int64_t i = 0; i < classes; i += kLanes) {
    const Lanes x = _mm512_mask_loadu_ps(least, lanes_at(i), logits + i);
    nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    peaks = _mm512_max_ps(peaks, x);
  }
  const float most = nan ? std::numeric_limits<float>::quiet_NaN() : largest_of(peaks);
  const float own = logits[label] - most;
  Lanes sums = all(0);
  for (int64_t i = 0; i < classes; i += kLanes) {
    const auto lanes = lanes_at(i);
    const Lanes power = exp_lanes(_mm512_sub_ps(_mm512_mask_loadu_ps(least, lanes, logits + i), all(most)));
    sums = _mm512_add_ps(sums, _mm512_maskz_mov_ps(lanes, power));
    if (wants_gradient) _mm512_mask_storeu_ps(logits + i, lanes, power);
  }
  const float sum = sum_of(sums);
  if (wants_gradient) {
    const Lanes share = all(1 / sum);
    for (int64_t i = 0; i < classes; i += kLanes) {
      const auto lanes = lanes_at(i);
      _mm512_mask_storeu_ps(logits + i, lanes, _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, logits + i), share));
    }
    logits[label] -= 1;
  }
  return std::log(sum) - own;
}

#pragma GCC pop_options
#pragma GCC diagnostic pop

}  // namespace

namespace on_cpu {

at::Tensor gate_loop(Gate kind, const at::Tensor& gate, const at::Tensor& up) {
  auto y = at::empty_like(gate);
  for_dtype_of(gate, [&]<class T>(T) {
    const T *from = gate.const_data_ptr<T>(), *factor = up.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    at::parallel_for(0, gate.numel(), kLoopElements, [&](int64_t begin, int64_t end) {
      kind == Gate::kSilu ? gate_range<SiluLanes>(from, factor, to, begin, end)
                          : gate_range<GeluLanes>(from, factor, to, begin, end);
    });
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> gate_backward_loop(Gate kind, const at::Tensor& grad, const at::Tensor& gate,
                                                      const at::Tensor& up) {
  auto grad_gate = at::empty_like(gate), grad_up = at::empty_like(gate);
  for_dtype_of(gate, [&]<class T>(T) {
    const T *g = grad.const_data_ptr<T>(), *from = gate.const_data_ptr<T>(), *factor = up.const_data_ptr<T>();
    T *to_gate = grad_gate.mutable_data_ptr<T>(), *to_up = grad_up.mutable_data_ptr<T>();
    at::parallel_for(0, gate.numel(), kLoopElements, [&](int64_t begin, int64_t end) {
      kind == Gate::kSilu ? gate_backward_range<SiluLanes>(g, from, factor, to_gate, to_up, begin, end)
                          : gate_backward_range<GeluLanes>(g, from, factor, to_gate, to_up, begin, end);
    });
  });
  return {grad_gate, grad_up};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_loop(const at::Tensor& x, const at::Tensor& factors, double eps,
                                                 bool rounds_first) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  auto y = at::empty_like(x);
  auto sizes = x.sizes().vec();
  sizes.back() = 1;
  auto inverse_rms = at::empty(sizes, x.options().dtype(at::kFloat));
  for_dtype_of(x, [&]<class T>(T) {
    const T* from = x.const_data_ptr<T>();
    const float* by = factors.const_data_ptr<float>();
    T* to = y.mutable_data_ptr<T>();
    float* inverse = inverse_rms.mutable_data_ptr<float>();
    at::parallel_for(0, rows, rows_at_once(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        norm_row(from + row * width, by, width, static_cast<float>(eps), rounds_first, to + row * width, inverse[row]);
      }
    });
  });
  return {y, inverse_rms};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_loop(const at::Tensor& grad, const at::Tensor& x,
                                                          const at::Tensor& factors, const at::Tensor& inverse_rms) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const int64_t block = std::max(rows_at_once(width), (rows + 63) / 64), blocks = (rows + block - 1) / block;
  auto grad_x = at::empty_like(x);
  auto partial = at::zeros({blocks, width}, x.options().dtype(at::kFloat));
  for_dtype_of(x, [&]<class T>(T) {
    const T *g = grad.const_data_ptr<T>(), *from = x.const_data_ptr<T>();
    const float *by = factors.const_data_ptr<float>(), *inverse = inverse_rms.const_data_ptr<float>();
    T* to = grad_x.mutable_data_ptr<T>();
    float* sums = partial.mutable_data_ptr<float>();
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * block; row < std::min(rows, end * block); ++row) {
        norm_row_backward(g + row * width, from + row * width, by, width, inverse[row], to + row * width,
                          sums + row / block * width);
      }
    });
  });
  return {grad_x, partial.sum(0)};
}

at::Tensor rotary_loop(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign) {
  const int64_t tokens = x.size(1), heads = x.size(2), width = x.size(3);
  const int64_t angle_row = cos.size(0) == 1 ? 0 : tokens * (width / 2);
  auto y = at::empty_like(x);
  for_dtype_of(x, [&]<class T>(T) {
    const T* from = x.const_data_ptr<T>();
    const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
    T* to = y.mutable_data_ptr<T>();
    at::parallel_for(0, x.size(0) * tokens, 16, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t angle = token / tokens * angle_row + token % tokens * (width / 2);
        for (int64_t at = token * heads * width; at < (token + 1) * heads * width; at += width) {
          rotate_head(from + at, c + angle, s + angle, sign, width / 2, to + at);
        }
      }
    });
  });
  return y;
}

at::Tensor cross_entropy_rows(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient) {
  const int64_t rows = logits.size(0), classes = logits.size(1);
  auto losses = at::empty({rows}, logits.options());
  float *of = logits.mutable_data_ptr<float>(), *to = losses.mutable_data_ptr<float>();
  const auto label = labels.contiguous();
  const int64_t* classes_of = label.const_data_ptr<int64_t>();
  at::parallel_for(0, rows, rows_at_once(classes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      to[row] = soften_row(of + row * classes, classes, classes_of[row], wants_gradient);
    }
  });
  return losses;
}

}  // namespace on_cpu
#else
namespace on_cpu {

[[noreturn]] void raise_no_loops() { raise(ErrorKind::kInternal, "[kernels.row_loops] not made for this processor"); }
at::Tensor gate_loop(Gate, const at::Tensor&, const at::Tensor&) { raise_no_loops(); }
std::tuple<at::Tensor, at::Tensor> gate_backward_loop(Gate, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  raise_no_loops();
}
std::tuple<at::Tensor, at::Tensor> rms_norm_loop(const at::Tensor&, const at::Tensor&, double, bool) {
  raise_no_loops();
}
std::tuple<at::Tensor, at::Tensor> rms_norm_backward_loop(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                          const at::Tensor&) {
  raise_no_loops();
}
at::Tensor rotary_loop(const at::Tensor&, const at::Tensor&, const at::Tensor&, float) { raise_no_loops(); }
at::Tensor cross_entropy_rows(const at::Tensor&, const at::Tensor&, bool) { raise_no_loops(); }

}  // namespace on_cpu
#endif

at::Tensor gate_loop(Gate kind, const at::Tensor& gate, const at::Tensor& up) {
  return gate.is_cuda() ? cuda::gate(kind, gate, up) : on_cpu::gate_loop(kind, gate, up);
}

std::tuple<at::Tensor, at::Tensor> gate_backward_loop(Gate kind, const at::Tensor& grad, const at::Tensor& gate,
                                                      const at::Tensor& up) {
  return gate.is_cuda() ? cuda::gate_backward(kind, grad, gate, up) : on_cpu::gate_backward_loop(kind, grad, gate, up);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_loop(const at::Tensor& x, const at::Tensor& factors, double eps,
                                                 bool rounds_first) {
  return x.is_cuda() ? cuda::rms_norm(x, factors, eps, rounds_first)
                     : on_cpu::rms_norm_loop(x, factors, eps, rounds_first);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_loop(const at::Tensor& grad, const at::Tensor& x,
                                                          const at::Tensor& factors, const at::Tensor& inverse_rms) {
  return x.is_cuda() ? cuda::rms_norm_backward(grad, x, factors, inverse_rms)
                     : on_cpu::rms_norm_backward_loop(grad, x, factors, inverse_rms);
}

at::Tensor rotary_loop(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign) {
  return x.is_cuda() ? cuda::rotary(x, cos, sin, sign) : on_cpu::rotary_loop(x, cos, sin, sign);
}

at::Tensor cross_entropy_rows(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient) {
  return logits.is_cuda() ? cuda::cross_entropy_rows(logits, labels, wants_gradient)
                          : on_cpu::cross_entropy_rows(logits, labels, wants_gradient);
}

}  // namespace tessera::detail
