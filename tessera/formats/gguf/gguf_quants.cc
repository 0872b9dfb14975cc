#include "tessera/formats/gguf/gguf_quants.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/copy_bytes.h"

// Results are bitwise those of the gguf Python package; a fused multiply-add would change the last bit.
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF data is little-endian and is read as it is");

constexpr std::array kTypes = {
    GgmlTypeInfo{GgmlType::kF32, "F32", 1, 4, true},       GgmlTypeInfo{GgmlType::kF16, "F16", 1, 2, true},
    GgmlTypeInfo{GgmlType::kQ4_0, "Q4_0", 32, 18, true},   GgmlTypeInfo{GgmlType::kQ4_1, "Q4_1", 32, 20, true},
    GgmlTypeInfo{GgmlType::kQ5_0, "Q5_0", 32, 22, true},   GgmlTypeInfo{GgmlType::kQ5_1, "Q5_1", 32, 24, true},
    GgmlTypeInfo{GgmlType::kQ8_0, "Q8_0", 32, 34, true},   GgmlTypeInfo{GgmlType{9}, "Q8_1", 32, 40, false},
    GgmlTypeInfo{GgmlType{10}, "Q2_K", 256, 84, false},    GgmlTypeInfo{GgmlType{11}, "Q3_K", 256, 110, false},
    GgmlTypeInfo{GgmlType::kQ4_K, "Q4_K", 256, 144, true}, GgmlTypeInfo{GgmlType::kQ5_K, "Q5_K", 256, 176, true},
    GgmlTypeInfo{GgmlType::kQ6_K, "Q6_K", 256, 210, true}, GgmlTypeInfo{GgmlType{15}, "Q8_K", 256, 292, false},
    GgmlTypeInfo{GgmlType{16}, "IQ2_XXS", 256, 66, false}, GgmlTypeInfo{GgmlType{17}, "IQ2_XS", 256, 74, false},
    GgmlTypeInfo{GgmlType{18}, "IQ3_XXS", 256, 98, false}, GgmlTypeInfo{GgmlType{19}, "IQ1_S", 256, 50, false},
    GgmlTypeInfo{GgmlType{20}, "IQ4_NL", 32, 18, false},   GgmlTypeInfo{GgmlType{21}, "IQ3_S", 256, 110, false},
    GgmlTypeInfo{GgmlType{22}, "IQ2_S", 256, 82, false},   GgmlTypeInfo{GgmlType{23}, "IQ4_XS", 256, 136, false},
    GgmlTypeInfo{GgmlType{24}, "I8", 1, 1, false},         GgmlTypeInfo{GgmlType{25}, "I16", 1, 2, false},
    GgmlTypeInfo{GgmlType{26}, "I32", 1, 4, false},        GgmlTypeInfo{GgmlType{27}, "I64", 1, 8, false},
    GgmlTypeInfo{GgmlType{28}, "F64", 1, 8, false},        GgmlTypeInfo{GgmlType{29}, "IQ1_M", 256, 56, false},
    GgmlTypeInfo{GgmlType::kBF16, "BF16", 1, 2, true},     GgmlTypeInfo{GgmlType{34}, "TQ1_0", 256, 54, false},
    GgmlTypeInfo{GgmlType{35}, "TQ2_0", 256, 66, false},   GgmlTypeInfo{GgmlType{39}, "MXFP4", 32, 17, false},
};

using Byte = uint8_t;

template <class T>
T load(const Byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

float load_half(const Byte* at) { return c10::detail::fp16_ieee_to_fp32_value(load<uint16_t>(at)); }

// Decodes a block of 32 elements: F16 scale, [F16 minimum,] [32 fifth bits,] 16 bytes of nibbles. The low nibbles are
// elements 0 to 15, the high nibbles 16 to 31. Without a minimum the quants are signed with zero point 8 or 16.
template <bool kMinimum, bool kFifthBit>
void decode_nibbles(const Byte* block, float* out) {
  const float scale = load_half(block);
  const float minimum = kMinimum ? load_half(block + 2) : 0.0F;
  block += kMinimum ? 4 : 2;
  const uint32_t fifth = kFifthBit ? load<uint32_t>(block) : 0;
  block += kFifthBit ? 4 : 0;
  constexpr int kZero = kFifthBit ? 16 : 8;
  for (int i = 0; i < 32; ++i) {
    const int nibble = i < 16 ? block[i] & 0xF : block[i - 16] >> 4;
    const int quant = nibble | static_cast<int>((fifth >> i & 1) << 4);
    out[i] = kMinimum ? scale * static_cast<float>(quant) + minimum : scale * static_cast<float>(quant - kZero);
  }
}

void decode_q8_0(const Byte* block, float* out) {
  const float scale = load_half(block);
  for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<int8_t>(block[2 + i])) * scale;
}

// Unpacks the 12 bytes that hold eight 6-bit scales and eight 6-bit minimums. Bytes 0-3 and 4-7 hold the first four
// scales and minimums in their low 6 bits; their upper 2 bits extend the nibbles of bytes 8-11 to the last four.
struct KScales {
  explicit KScales(const Byte* packed) {
    for (int i = 0; i < 4; ++i) {
      const int low = packed[i], middle = packed[4 + i], high = packed[8 + i];
      scale[i] = low & 0x3F;
      minimum[i] = middle & 0x3F;
      scale[4 + i] = (high & 0x0F) | (low >> 2 & 0x30);
      minimum[4 + i] = high >> 4 | (middle >> 2 & 0x30);
    }
  }
  int scale[8];
  int minimum[8];
};

// Decodes a block of 256 elements in 8 groups of 32: F16 scale, F16 scale of the minimums, 12 bytes of KScales, [32
// bytes of fifth bits,] 128 bytes of nibbles. One byte holds an element of each of two neighbouring groups. An element
// is scale * group scale * quant - minimum scale * group minimum.
template <bool kFifthBit>
void decode_k(const Byte* block, float* out) {
  const float scale = load_half(block);
  const float minimum = load_half(block + 2);
  const KScales scales(block + 4);
  const Byte* fifth = block + 16;
  const Byte* nibbles = fifth + (kFifthBit ? 32 : 0);
  for (int group = 0; group < 8; ++group) {
    const float d = scale * static_cast<float>(scales.scale[group]);
    const float m = minimum * static_cast<float>(scales.minimum[group]);
    for (int i = 0; i < 32; ++i) {
      int quant = nibbles[group / 2 * 32 + i] >> (group % 2 * 4) & 0xF;
      if (kFifthBit) quant |= (fifth[i] >> group & 1) << 4;
      out[group * 32 + i] = d * static_cast<float>(quant) - m;
    }
  }
}

// Decodes a block of 256 elements: 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 int8 scales of 16 elements
// each, F16 scale. The zero point of the 6-bit quants is 32.
void decode_q6_k(const Byte* block, float* out) {
  const Byte* low = block;
  const Byte* high = block + 128;
  const Byte* scales = block + 192;
  const float scale = load_half(block + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, quarter = i % 128 / 32, lane = i % 32;
    const int nibble = low[half * 64 + quarter % 2 * 32 + lane] >> (quarter / 2 * 4) & 0xF;
    const int pair = high[half * 32 + lane] >> (quarter * 2) & 3;
    const float d = scale * static_cast<float>(static_cast<int8_t>(scales[i / 16]));
    out[i] = d * static_cast<float>((nibble | pair << 4) - 32);
  }
}

template <class Decode>
void each_block(const Byte* blocks, std::span<float> values, const GgmlTypeInfo& info, Decode decode) {
  for (size_t at = 0; at < values.size(); at += info.block_elements, blocks += info.block_bytes) {
    decode(blocks, values.data() + at);
  }
}

}  // namespace

const GgmlTypeInfo* ggml_type_info(uint32_t type) noexcept {
  const auto found = std::ranges::find_if(
      kTypes, [type](const GgmlTypeInfo& info) { return static_cast<uint32_t>(info.type) == type; });
  return found == kTypes.end() ? nullptr : &*found;
}

void dequantize(GgmlType type, std::span<const std::byte> blocks, std::span<float> values) {
  const auto* info = ggml_type_info(static_cast<uint32_t>(type));
  TESSERA_CHECK(info && info->decodes, ErrorKind::kFormat, "[gguf] tensor type {} cannot be decoded",
                info ? info->name : std::string_view("unknown"));
  TESSERA_CHECK(values.size() % info->block_elements == 0 &&
                    blocks.size() == values.size() / info->block_elements * info->block_bytes,
                ErrorKind::kInternal, "[gguf] {} bytes of {} are not {} values", blocks.size(), info->name,
                values.size());
  const auto* bytes = reinterpret_cast<const Byte*>(blocks.data());
  switch (type) {
    case GgmlType::kF32:
      copy_bytes(values.data(), bytes, blocks.size());
      return;
    case GgmlType::kF16:
      return each_block(bytes, values, *info, [](const Byte* in, float* out) { *out = load_half(in); });
    case GgmlType::kBF16:
      return each_block(bytes, values, *info, [](const Byte* in, float* out) {
        *out = std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(in)) << 16);
      });
    case GgmlType::kQ4_0:
      return each_block(bytes, values, *info, decode_nibbles<false, false>);
    case GgmlType::kQ4_1:
      return each_block(bytes, values, *info, decode_nibbles<true, false>);
    case GgmlType::kQ5_0:
      return each_block(bytes, values, *info, decode_nibbles<false, true>);
    case GgmlType::kQ5_1:
      return each_block(bytes, values, *info, decode_nibbles<true, true>);
    case GgmlType::kQ8_0:
      return each_block(bytes, values, *info, decode_q8_0);
    case GgmlType::kQ4_K:
      return each_block(bytes, values, *info, decode_k<false>);
    case GgmlType::kQ5_K:
      return each_block(bytes, values, *info, decode_k<true>);
    case GgmlType::kQ6_K:
      return each_block(bytes, values, *info, decode_q6_k);
  }
}

// Like llama.cpp's reference: the stored scale is rounded to F16, but the quants use the unrounded scale.
void quantize_q8_0(std::span<const float> values, std::span<std::byte> blocks) {
  TESSERA_CHECK(values.size() % 32 == 0 && blocks.size() == values.size() / 32 * 34, ErrorKind::kInternal,
                "[gguf] {} values do not make {} bytes of Q8_0", values.size(), blocks.size());
  for (size_t block = 0; block < values.size() / 32; ++block) {
    const float* in = values.data() + block * 32;
    std::byte* out = blocks.data() + block * 34;
    float largest = 0;
    for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(in[i]));
    const float scale = largest / 127;
    const float inverse = scale == 0 ? 0 : 1 / scale;
    const uint16_t half = c10::detail::fp16_ieee_from_fp32_value(scale);
    std::memcpy(out, &half, sizeof half);
    for (int i = 0; i < 32; ++i) {
      const float rounded = std::round(in[i] * inverse);
      const float kept = std::isnan(rounded) ? 0.0F : std::clamp(rounded, -127.0F, 127.0F);
      out[2 + i] = static_cast<std::byte>(static_cast<int8_t>(kept));
    }
  }
}

}  // namespace tessera
