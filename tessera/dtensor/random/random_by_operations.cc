// fill_by_operations(): random numbers on devices other than the CPU, as Philox in integer ATen operations. This takes
// about 80 passes over memory, so a device kernel would be faster. The random bits are those of random_fill.cc.
#include <ATen/ATen.h>

#include <array>
#include <bit>
#include <cmath>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/base/philox.h"
#include "tessera/dtensor/random/random_fill.h"

namespace tessera {

namespace {

constexpr int64_t kLow32 = 0xffffffff;

// Global linear index of each local element, in the order of a contiguous local tensor.
at::Tensor global_indices(const ShardRegion& region, c10::Device device) {
  at::Tensor index = at::zeros(Sizes(region.sizes.size(), 1), at::TensorOptions(at::kLong).device(device));
  int64_t stride = 1;
  for (size_t dim = region.sizes.size(); dim-- > 0;) {
    std::vector<at::Tensor> along;
    for (const IndexSpan& span : region.index_spans[dim]) {
      along.push_back(at::arange(span.start, span.start + span.size, index.options()));
    }
    Sizes shape(region.sizes.size(), 1);
    shape[dim] = region.sizes[dim];
    index = index + (at::cat(along) * stride).view(shape);
    stride *= region.global[dim];
  }
  return index.reshape({-1});
}

at::Tensor left(const at::Tensor& words, int64_t bits) { return at::bitwise_left_shift(words, bits); }
at::Tensor right(const at::Tensor& words, int64_t bits) { return at::bitwise_right_shift(words, bits); }
at::Tensor with_bits(const at::Tensor& words, uint32_t bits) {
  return at::bitwise_xor(words, static_cast<int64_t>(bits));
}

// The product of 32-bit numbers and a 32-bit constant, as its low and high halves. Products of 16-bit halves keep every
// intermediate below 2^49, so int64 does not overflow.
std::pair<at::Tensor, at::Tensor> multiply(const at::Tensor& x, uint32_t constant) {
  const at::Tensor low = at::bitwise_and(x, 0xffff) * static_cast<int64_t>(constant);  // below 2^48
  const at::Tensor high = right(x, 16) * static_cast<int64_t>(constant);               // below 2^48
  const at::Tensor sum = right(low, 16) + high;                                        // below 2^49
  return {at::bitwise_or(left(at::bitwise_and(sum, 0xffff), 16), at::bitwise_and(low, 0xffff)), right(sum, 16)};
}

// Returns the four 32-bit words of the Philox block with each number in `block`, as int64 tensors. The computation is
// that of philox() in base/philox.h.
std::array<at::Tensor, 4> philox_of(const RandomStreamKey& key, const at::Tensor& block) {
  auto k0 = static_cast<uint32_t>(key.seed);
  auto k1 = static_cast<uint32_t>(key.seed >> 32);
  std::array<at::Tensor, 4> c = {at::bitwise_and(block, kLow32), right(block, 32),
                                 at::full_like(block, static_cast<int64_t>(key.operation & kLow32)),
                                 at::full_like(block, static_cast<int64_t>(key.operation >> 32))};
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const auto [low0, high0] = multiply(c[0], kPhiloxM0);
    const auto [low1, high1] = multiply(c[2], kPhiloxM1);
    c = {with_bits(high1.bitwise_xor(c[1]), k0), low1, with_bits(high0.bitwise_xor(c[3]), k1), low0};
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return c;
}

// Returns a tensor whose element i is lanes[lane[i]][i].
at::Tensor select_lane(const std::array<at::Tensor, 4>& lanes, const at::Tensor& lane) {
  at::Tensor picked = lanes[0];
  for (int i = 1; i < 4; ++i) picked = at::where(lane == i, lanes[i], picked);
  return picked;
}

// A float64 in [0, 1) from the upper 53 of the 64 bits of two 32-bit words.
at::Tensor fraction(const at::Tensor& high, const at::Tensor& low) {
  return at::bitwise_or(left(high, 21), right(low, 11)).to(at::kDouble) * 0x1p-53;
}

// Computes uniform and normal values from Philox words. For element i, lanes[0 ... 3][i] are the words of the element's
// block. A block gives 2 values in double and 4 in float, as in random_fill.cc.
struct PhiloxValues {
  const std::array<at::Tensor, 4> lanes;
  const at::Tensor index_in_block;  // index of the value in its block
  bool doubles;

  at::Tensor fractions(int digits) const {
    if (doubles) return fraction(select_lane(lanes, index_in_block * 2), select_lane(lanes, index_in_block * 2 + 1));
    return right(select_lane(lanes, index_in_block), 32 - digits).to(at::kFloat) * std::ldexp(1.0, -digits);
  }
  at::Tensor double_fractions(int digits) const { return fractions(digits).to(at::kDouble); }
  at::Tensor normals() const {
    at::Tensor u1;
    at::Tensor u2;
    if (doubles) {
      u1 = fraction(lanes[0], lanes[1]) + 0x1p-54;
      u2 = fraction(lanes[2], lanes[3]);
    } else {
      const at::Tensor first = right(index_in_block, 1) * 2;
      u1 = (select_lane(lanes, first).to(at::kFloat) * 0x1p-32 + 0x1p-33).to(at::kDouble);
      u2 = right(select_lane(lanes, first + 1), 8).to(at::kDouble) * 0x1p-24;
    }
    const at::Tensor angle = u2 * (2 * std::numbers::pi);
    return (u1.log() * -2).sqrt() * at::where(at::bitwise_and(index_in_block, 1) == 0, angle.cos(), angle.sin());
  }
};

// The remainder, modulo `range`, of the unsigned 64-bit word with the 32-bit halves `high` and `low`; range 0 means
// 2^64. int64 tensors are signed, so the word itself cannot be divided. For a power of two the function masks bits, for
// a range below 2^31 it combines the remainders of the halves, and for a larger range it divides bit by bit.
at::Tensor unsigned_remainder(const at::Tensor& high, const at::Tensor& low, uint64_t range) {
  if (std::has_single_bit(range) || range == 0) {
    return at::bitwise_and(at::bitwise_or(left(high, 32), low), static_cast<int64_t>(range - 1));
  }
  TESSERA_CHECK(range < uint64_t{1} << 62, ErrorKind::kShape,
                "[dtensor.random] integers: found a range of {}, wanted less than 2^62 on this device.", range);
  if (range >> 31 != 0) {  // (2 r + bit) mod range does not overflow as range < 2^62
    at::Tensor partial_remainder = at::zeros_like(high);
    for (int bit = 63; bit >= 0; --bit) {
      const at::Tensor& word = bit >= 32 ? high : low;
      partial_remainder = at::bitwise_or(left(partial_remainder, 1), at::bitwise_and(right(word, bit % 32), 1));
      partial_remainder = at::where(partial_remainder >= static_cast<int64_t>(range),
                                    partial_remainder - static_cast<int64_t>(range), partial_remainder);
    }
    return partial_remainder;
  }
  const auto modulus = static_cast<int64_t>(range);
  const int64_t shift = (int64_t{1} << 32) % modulus;
  return ((high % modulus) * shift + low) % modulus;
}

}  // namespace

void fill_by_operations(const at::Tensor& part, const ShardRegion& region, const RandomStreamKey& key,
                        const Distribution& d) {
  const auto type = part.scalar_type();
  const bool doubles = type == at::kDouble || at::isIntegralType(type, true);
  const int width = d.kind == DistributionKind::kInteger || doubles ? 2 : 4;
  const at::Tensor index = global_indices(region, part.device());
  const auto rounding = "trunc";
  const at::Tensor index_in_block = index.remainder(width);
  const PhiloxValues philox_values{philox_of(key, index.div(width, rounding)), index_in_block, doubles};
  at::Tensor values;
  switch (d.kind) {
    case DistributionKind::kInteger: {
      const at::Tensor first = index_in_block * 2;
      values = unsigned_remainder(select_lane(philox_values.lanes, first), select_lane(philox_values.lanes, first + 1),
                                  d.range) +
               d.low;
      break;
    }
    case DistributionKind::kNormal:
      values = philox_values.normals() * d.b + d.a;
      break;
    case DistributionKind::kLogNormal:
      values = (philox_values.normals() * d.b + d.a).exp();
      break;
    case DistributionKind::kUniform:
      values = philox_values.fractions(fraction_bits(type)) * (d.b - d.a) + d.a;
      break;
    case DistributionKind::kExponential:
      values = philox_values.double_fractions(fraction_bits(type)).neg().log1p() / -d.a;
      break;
    case DistributionKind::kCauchy:
      values = ((philox_values.double_fractions(fraction_bits(type)) - 0.5) * std::numbers::pi).tan() * d.b + d.a;
      break;
    case DistributionKind::kGeometric:
      values =
          (philox_values.double_fractions(fraction_bits(type)).neg().log1p() / std::log1p(-d.a)).ceil().clamp_min(1);
      break;
  }
  if (values.scalar_type() == at::kDouble && !doubles) values = values.to(at::kFloat);  // rounded once, as on the CPU
  part.copy_(values.view(part.sizes()));
}

}  // namespace tessera
