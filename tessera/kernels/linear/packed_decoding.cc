#include "tessera/kernels/linear/packed_decoding.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"

namespace tessera::kernels {
namespace {

// Reads `count` bytes of each block, starting at byte `at`, as numbers of dtype `type`, and converts these to float32.
at::Tensor numbers(const at::Tensor& bytes, int64_t at, int64_t count, at::ScalarType type) {
  return bytes.narrow(1, at, count).contiguous().view(type).to(at::kFloat);
}

at::Tensor low_half(const at::Tensor& bytes) { return bytes.bitwise_and(15); }
at::Tensor high_half(const at::Tensor& bytes) { return bytes.bitwise_right_shift(4); }

// Returns `count` shift counts 0, step, 2 step, ... with the dtype and device of `beside`.
at::Tensor shifts(int64_t count, int64_t step, const at::Tensor& beside) {
  return at::arange(0, count * step, step, beside.options());
}

// Decodes blocks of 4- and 5-bit codes: bytes [blocks, 18 to 24] to float32 [blocks, 32]. The formats are described at
// decode_nibbles and its neighbours in formats/gguf/gguf_quants.cc.
at::Tensor decode_q4_or_q5(at::Tensor bytes, bool minimum, bool fifth_bit) {
  const auto scale = numbers(bytes, 0, 2, at::kHalf);
  const auto least = minimum ? numbers(bytes, 2, 2, at::kHalf) : at::Tensor();
  int64_t at = minimum ? 4 : 2;
  at::Tensor fifth;
  if (fifth_bit) {
    fifth = bytes.narrow(1, at, 4).unsqueeze(2).bitwise_right_shift(shifts(8, 1, bytes)).bitwise_and(1);
    fifth = fifth.reshape({-1, 32}).bitwise_left_shift(4);
    at += 4;
  }
  const auto both = bytes.narrow(1, at, 16);
  auto codes = at::cat({low_half(both), high_half(both)}, 1);
  if (fifth_bit) codes = codes.bitwise_or(fifth);
  const auto quants = codes.to(at::kFloat);
  return minimum ? scale.mul(quants).add_(least) : scale.mul(quants.sub(fifth_bit ? 16 : 8));
}

at::Tensor decode_q8_0(const at::Tensor& bytes) {
  return numbers(bytes, 2, 32, at::kChar).mul_(numbers(bytes, 0, 2, at::kHalf));
}

// Decodes blocks of Q4_K and Q5_K to float32 [blocks, 256]. A block has eight groups of 32 elements, each with a 6-bit
// scale and minimum.
at::Tensor decode_q4_k_or_q5_k(const at::Tensor& bytes, bool fifth_bit) {
  // Groups 0-3: the lower six bits of bytes 4-7 are the scales, those of bytes 8-11 the minimums. Groups 4-7: bytes
  // 12-15 have the lower four bits of scale and minimum, and the top two bits of bytes 4-11 are their upper bits.
  const auto low = bytes.narrow(1, 4, 4), middle = bytes.narrow(1, 8, 4), high = bytes.narrow(1, 12, 4);
  const auto upper = [](const at::Tensor& of) { return of.bitwise_right_shift(2).bitwise_and(0x30); };
  const auto scales = at::cat({low.bitwise_and(0x3F), low_half(high).bitwise_or(upper(low))}, 1);
  const auto minimums = at::cat({middle.bitwise_and(0x3F), high_half(high).bitwise_or(upper(middle))}, 1);
  const auto both = bytes.narrow(1, fifth_bit ? 48 : 16, 128).reshape({-1, 4, 32});
  auto codes = at::stack({low_half(both), high_half(both)}, 2).view({-1, 8, 32});
  if (fifth_bit) {
    const auto bits = bytes.narrow(1, 16, 32).unsqueeze(1).bitwise_right_shift(shifts(8, 1, bytes).unsqueeze(1));
    codes = codes.bitwise_or(bits.bitwise_and(1).bitwise_left_shift(4));
  }
  const auto scale = numbers(bytes, 0, 2, at::kHalf).mul(scales.to(at::kFloat)),
             least = numbers(bytes, 2, 2, at::kHalf).mul(minimums.to(at::kFloat));
  return scale.unsqueeze(2).mul(codes.to(at::kFloat)).sub_(least.unsqueeze(2));
}

// Decodes blocks of Q6_K to float32 [blocks, 256]. A block has two halves of four groups of 32 elements, and a signed
// scale for each 16 elements.
at::Tensor decode_q6_k(const at::Tensor& bytes) {
  const auto low = bytes.narrow(1, 0, 128).reshape({-1, 2, 1, 2, 32});
  const auto lower = low.bitwise_right_shift(shifts(2, 4, bytes).view({2, 1, 1})).bitwise_and(15);
  const auto high = bytes.narrow(1, 128, 64).reshape({-1, 2, 1, 32});
  const auto upper = high.bitwise_right_shift(shifts(4, 2, bytes).unsqueeze(1)).bitwise_and(3).bitwise_left_shift(4);
  const auto quants = lower.reshape({-1, 2, 4, 32}).bitwise_or(upper).to(at::kFloat).sub_(32).view({-1, 16, 16});
  const auto scale = numbers(bytes, 208, 2, at::kHalf).mul(numbers(bytes, 192, 16, at::kChar));
  return scale.unsqueeze(2).mul(quants);
}

at::Tensor decode_blocks(GgmlType type, const at::Tensor& bytes) {
  switch (type) {
    case GgmlType::kF32:
      return bytes.view(at::kFloat);
    case GgmlType::kF16:
      return bytes.view(at::kHalf).to(at::kFloat);
    case GgmlType::kBF16:
      return bytes.view(at::kBFloat16).to(at::kFloat);
    case GgmlType::kQ4_0:
      return decode_q4_or_q5(bytes, false, false);
    case GgmlType::kQ4_1:
      return decode_q4_or_q5(bytes, true, false);
    case GgmlType::kQ5_0:
      return decode_q4_or_q5(bytes, false, true);
    case GgmlType::kQ5_1:
      return decode_q4_or_q5(bytes, true, true);
    case GgmlType::kQ8_0:
      return decode_q8_0(bytes);
    case GgmlType::kQ4_K:
      return decode_q4_k_or_q5_k(bytes, false);
    case GgmlType::kQ5_K:
      return decode_q4_k_or_q5_k(bytes, true);
    case GgmlType::kQ6_K:
      return decode_q6_k(bytes);
  }
  raise(ErrorKind::kInternal, "[kernels.quantized] no decoder for the GGUF type {}", static_cast<uint32_t>(type));
}

}  // namespace

at::Tensor decode_codes(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& table, int64_t block,
                        int64_t count) {
  const auto each = at::stack({high_half(codes), low_half(codes)}, 1).view({-1}).narrow(0, 0, count);
  const auto scale = scales.unsqueeze(1).expand({scales.numel(), block}).reshape({-1}).narrow(0, 0, count);
  return table.index_select(0, each.to(at::kInt)).mul_(scale);
}

at::Tensor decode_gguf_rows(GgmlType type, const at::Tensor& bytes, int64_t in) {
  const auto* const info = ggml_type_info(static_cast<uint32_t>(type));
  return decode_blocks(type, bytes.contiguous().view({-1, info->block_bytes})).reshape({bytes.size(0), in});
}

}  // namespace tessera::kernels
