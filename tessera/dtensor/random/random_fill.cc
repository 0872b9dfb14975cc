// Fills a tensor on the CPU with random numbers, along ranges that are contiguous both in this rank's memory and in the
// global tensor. Every element is computed by the same scalar code, because vectorized logarithms differ from scalar
// ones in the last bit and the sharding would decide which elements are vectorized. Logarithms, sines and cosines are
// computed in float64 and rounded once. The math functions of other devices differ in the last bits of float64, so
// after rounding those devices give the same float32 or an adjacent one.
#include "tessera/dtensor/random/random_fill.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <numbers>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/base/philox.h"

namespace tessera {

namespace {

// Divides the local tensor into ranges of elements that are also consecutive in the global tensor.
class ContiguousRanges {
 public:
  explicit ContiguousRanges(const ShardRegion& region) : region_(region), ndim_(region.sizes.size()) {
    // The trailing dims that are not sharded have inner_ elements together, which are consecutive. row_spans_ has the
    // ranges of indices that this rank has in the dim before the trailing dims, the last sharded dim. A "row" is all
    // local elements with the same index in the dims before the last sharded dim. If no dim is sharded, the whole
    // tensor is one row.
    size_t dim = ndim_;
    while (dim > 0 && region.sizes[dim - 1] == region.global[dim - 1]) inner_ *= region.global[--dim];
    outer_dims_ = dim == 0 ? 0 : dim - 1;
    row_spans_ = dim == 0 ? IndexSpans{{0, 1}} : region.index_spans[dim - 1];
    row_ = length(row_spans_) * inner_;
    global_row_ = dim == 0 ? inner_ : region.global[dim - 1] * inner_;
  }

  // Splits the local elements [begin, end) into ranges that are also consecutive in the global tensor, and calls
  // visit(local, global, count) for each range in ascending order. `local` and `global` are the linear indices of the
  // range's first element in the local and in the global tensor; `count` is the number of elements.
  template <class Visit>
  void visit(int64_t begin, int64_t end, Visit visit) const {
    while (begin < end) {
      const int64_t row = begin / row_;
      int64_t within = begin % row_;
      const int64_t start = global_start(row);
      for (const IndexSpan& span : row_spans_) {
        const int64_t size = span.size * inner_;
        if (within >= size) {
          within -= size;
          continue;
        }
        const int64_t count = std::min(size - within, end - begin);
        visit(begin, start + span.start * inner_ + within, count);
        begin += count;
        within = 0;
        if (begin == end) return;
      }
    }
  }

 private:
  // Returns the global linear index of the element that has the global indices of row `row` in the outer dims (the
  // first outer_dims_ dims) and index 0 in all other dims. `row` is the linear index of the row over the outer dims of
  // the local tensor.
  int64_t global_start(int64_t row) const {
    int64_t start = 0;
    int64_t stride = global_row_;
    for (size_t dim = outer_dims_; dim-- > 0;) {
      int64_t index = row % region_.sizes[dim];
      row /= region_.sizes[dim];
      for (const IndexSpan& span : region_.index_spans[dim]) {
        if (index < span.size) {
          start += (span.start + index) * stride;
          break;
        }
        index -= span.size;
      }
      stride *= region_.global[dim];
    }
    return start;
  }

  const ShardRegion& region_;
  size_t ndim_;
  int64_t inner_ = 1;
  size_t outer_dims_ = 0;
  IndexSpans row_spans_;
  int64_t row_ = 0;
  int64_t global_row_ = 0;
};

// Fills `out` with values. make(bits, values) computes W values from one Philox block. The element with global index g
// is value g % W of block g / W. So a value depends only on its global index, also if a range starts inside a block.
template <int W, class T, class Make>
void fill(T* out, const ShardRegion& region, const RandomStreamKey& key, Make make) {
  const ContiguousRanges ranges(region);
  at::parallel_for(0, region.numel(), 4096, [&](int64_t begin, int64_t end) {
    ranges.visit(begin, end, [&](int64_t local, int64_t global, int64_t count) {
      T* to = out + local;
      const int64_t last = global + count;
      while (global < last) {
        T values[W];
        make(philox(key.seed, static_cast<uint64_t>(global / W), key.operation), values);
        for (auto lane = global % W; lane < W && global < last; ++lane, ++global) *to++ = values[lane];
      }
    });
  });
}

// A number in [0, 1) with `digits` binary digits, from the upper bits of a 32-bit word; for double with 53 digits from
// two words.
float fraction(uint32_t bits, int digits) { return std::ldexp(static_cast<float>(bits >> (32 - digits)), -digits); }
double fraction(uint32_t high, uint32_t low) {
  return static_cast<double>((uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
}

// Number of values that one Philox block gives: two doubles or four floats.
template <class T>
constexpr int kValuesOfBlock = std::is_same_v<T, double> ? 2 : 4;

// Writes kValuesOfBlock<T> uniform numbers in [0, 1) to u, computed from one Philox block.
template <class T>
void fractions(const PhiloxBlock& bits, int digits, T* u) {
  for (int i = 0; i < kValuesOfBlock<T>; ++i) {
    if constexpr (std::is_same_v<T, double>) {
      u[i] = fraction(bits[2 * i], bits[2 * i + 1]);
    } else {
      u[i] = fraction(bits[i], digits);
    }
  }
}

// Computes two normal values z[0], z[1] from two uniform numbers (Box-Muller). u1 must not be 0.
void normal_pair(double u1, double u2, double* z) {
  const double radius = std::sqrt(-2 * std::log(u1));
  const double angle = 2 * std::numbers::pi * u2;
  z[0] = radius * std::cos(angle);
  z[1] = radius * std::sin(angle);
}

// Writes kValuesOfBlock<T> normal values to z, computed from one Philox block.
template <class T>
void normals(const PhiloxBlock& bits, double* z) {
  if constexpr (std::is_same_v<T, double>) {
    normal_pair(fraction(bits[0], bits[1]) + 0x1p-54, fraction(bits[2], bits[3]), z);
  } else {
    for (int i = 0; i < 4; i += 2) {  // u1 uses all 32 bits, so that large values occur
      normal_pair(static_cast<float>(bits[i]) * 0x1p-32f + 0x1p-33f, fraction(bits[i + 1], 24), z + i);
    }
  }
}

template <class T>
void fill_real(T* out, const ShardRegion& region, const RandomStreamKey& key, const Distribution& d, int digits) {
  constexpr int kCount = kValuesOfBlock<T>;
  if (d.kind == DistributionKind::kNormal || d.kind == DistributionKind::kLogNormal) {
    fill<kCount>(out, region, key,
                 [=, log_normal = d.kind == DistributionKind::kLogNormal](const PhiloxBlock& bits, T* values) {
                   double z[kCount];
                   normals<T>(bits, z);
                   for (int i = 0; i < kCount; ++i) {
                     const double value = z[i] * d.b + d.a;
                     values[i] = static_cast<T>(log_normal ? std::exp(value) : value);
                   }
                 });
    return;
  }
  const T low = static_cast<T>(d.a), width = static_cast<T>(d.b - d.a);
  const double log_failure = d.kind == DistributionKind::kGeometric ? std::log1p(-d.a) : 0;
  fill<kCount>(out, region, key, [=](const PhiloxBlock& bits, T* values) {
    fractions(bits, digits, values);
    for (int i = 0; i < kCount; ++i) {
      const double u = values[i];
      switch (d.kind) {
        case DistributionKind::kUniform:
          values[i] = values[i] * width + low;
          break;
        case DistributionKind::kExponential:
          values[i] = static_cast<T>(-std::log1p(-u) / d.a);
          break;
        case DistributionKind::kCauchy:
          values[i] = static_cast<T>(d.a + d.b * std::tan(std::numbers::pi * (u - 0.5)));
          break;
        default:  // kGeometric: 1 - u is in (0, 1]
          values[i] = static_cast<T>(std::max(std::ceil(std::log1p(-u) / log_failure), 1.0));
          break;
      }
    }
  });
}

void fill_integers(int64_t* out, const ShardRegion& region, const RandomStreamKey& key, const Distribution& d) {
  fill<2>(out, region, key,
          [low = static_cast<uint64_t>(d.low), range = d.range](const PhiloxBlock& bits, int64_t* values) {
            for (int i = 0; i < 2; ++i) {
              const uint64_t word = uint64_t{bits[2 * i]} << 32 | bits[2 * i + 1];
              values[i] = static_cast<int64_t>(low + (range == 0 ? word : word % range));
            }
          });
}

}  // namespace

void for_each_contiguous_range(const ShardRegion& region, const std::function<void(int64_t, int64_t, int64_t)>& visit) {
  const ContiguousRanges ranges(region);
  at::parallel_for(0, region.numel(), 1024, [&](int64_t begin, int64_t end) { ranges.visit(begin, end, visit); });
}

void fill_random(const at::Tensor& part, const ShardRegion& region, const RandomStreamKey& key,
                 const Distribution& distribution) {
  TESSERA_CHECK(part.sizes() == c10::IntArrayRef(region.sizes), ErrorKind::kInternal,
                "[dtensor.random] local tensor: its shape does not match the placements. Was the DTensor made by "
                "from_local from tensors of other sizes?");
  const auto type = part.scalar_type();
  if (part.numel() == 0) return;
  if (at::isComplexType(type)) {  // real and imaginary part are independent, each with variance b^2 / 2
    TESSERA_CHECK(distribution.kind == DistributionKind::kNormal, ErrorKind::kShape,
                  "[dtensor.random] found dtype {}, wanted a real one for this distribution.", c10::toString(type));
    Distribution half = distribution;
    half.b /= std::numbers::sqrt2;
    half.a = 0;
    fill_random(at::view_as_real(part), region.with_last_dim(2), key, half);
    if (distribution.a != 0) part.add_(distribution.a);
    return;
  }
  const auto compute = distribution.kind == DistributionKind::kInteger         ? at::kLong
                       : type == at::kDouble || at::isIntegralType(type, true) ? at::kDouble
                                                                               : at::kFloat;
  if (!part.is_cpu()) {
    fill_by_operations(part, region, key, distribution);
    return;
  }
  const bool direct = part.is_contiguous() && type == compute;
  const at::Tensor values = direct ? part : at::empty(region.sizes, part.options().dtype(compute));
  if (compute == at::kLong) {
    fill_integers(values.mutable_data_ptr<int64_t>(), region, key, distribution);
  } else if (compute == at::kDouble) {
    fill_real(values.mutable_data_ptr<double>(), region, key, distribution, 53);
  } else {
    fill_real(values.mutable_data_ptr<float>(), region, key, distribution, fraction_bits(type));
  }
  if (!direct) part.copy_(values);
}

}  // namespace tessera
