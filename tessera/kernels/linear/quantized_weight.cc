#include "tessera/kernels/linear/quantized_weight.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/kernels/linear/dynamic_map.h"
#include "tessera/kernels/linear/packed_decoding.h"

namespace tessera::kernels {
namespace {

constexpr int64_t kNf4Block = 64, kNestedBlock = 256;

constexpr std::array<float, 16> kNf4 = {-1.0F,
                                        -0.6961928009986877F,
                                        -0.5250730514526367F,
                                        -0.39491748809814453F,
                                        -0.28444138169288635F,
                                        -0.18477343022823334F,
                                        -0.09105003625154495F,
                                        0.0F,
                                        0.07958029955625534F,
                                        0.16093020141124725F,
                                        0.24611230194568634F,
                                        0.33791524171829224F,
                                        0.44070982933044434F,
                                        0.5626170039176941F,
                                        0.7229568362236023F,
                                        1.0F};

const at::Tensor& nf4_table() {
  static const at::Tensor table = at::tensor(at::ArrayRef<float>(kNf4.data(), kNf4.size()));
  return table;
}

const at::Tensor& scale_map() {
  static const at::Tensor map = kernels::dynamic_map(/*is_signed=*/true);
  return map;
}

int64_t blocks_of(int64_t elements, int64_t block) { return (elements + block - 1) / block; }

// Returns the index of the nearest NF4 value; of two equally near values, the lower index.
uint8_t nearest_nf4(float value) {
  const auto above = std::ranges::upper_bound(kNf4, value);
  if (above == kNf4.begin()) return 0;
  if (above == kNf4.end()) return 15;
  const auto up = static_cast<uint8_t>(above - kNf4.begin());
  return value > (kNf4[up - 1] + kNf4[up]) / 2 ? up : static_cast<uint8_t>(up - 1);
}

void encode_nf4(const float* values, int64_t count, float largest, uint8_t* packed) {
  const float scale = largest > 0 ? 1 / largest : 0;
  for (int64_t i = 0; i < count; i += 2) {
    const uint8_t first = nearest_nf4(values[i] * scale);
    const uint8_t second = i + 1 < count ? nearest_nf4(values[i + 1] * scale) : 0;
    packed[i / 2] = static_cast<uint8_t>(first << 4 | second);
  }
}

// Quantizes values to 8 bits in blocks of 256. Each value is divided by the largest absolute value of its block; its
// code is the index of the nearest value in the table of 8-bit dynamic quantization (kernels/linear/dynamic_map.h).
// Returns the codes and each block's largest absolute value.
std::pair<at::Tensor, at::Tensor> to_8_bits(const at::Tensor& values) {
  const int64_t count = values.numel(), blocks = blocks_of(count, kNestedBlock);
  const at::Tensor& map = scale_map();
  auto codes = at::empty({count}, at::kByte), largest = at::empty({blocks}, at::kFloat);
  const auto *from = values.const_data_ptr<float>(), *steps = map.const_data_ptr<float>();
  auto* const to = codes.mutable_data_ptr<uint8_t>();
  // A block of zeros has scale 0 and the codes of the value 0.
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kNestedBlock, end = std::min(begin + kNestedBlock, count);
    float most = 0;
    for (int64_t i = begin; i < end; ++i) most = std::max(most, std::abs(from[i]));
    largest.mutable_data_ptr<float>()[block] = most;
    const float scale = most > 0 ? 1 / most : 0;
    for (int64_t i = begin; i < end; ++i) to[i] = kernels::nearest_in_map(steps, from[i] * scale);
  }
  return {codes, largest};
}

}  // namespace

std::span<const float, 16> nf4_values() { return kNf4; }

QuantizedWeight QuantizedWeight::nf4(const at::Tensor& values, const Nf4Options& options) {
  TESSERA_CHECK(values.dim() == 2 && values.is_cpu() && c10::isFloatingType(values.scalar_type()), ErrorKind::kShape,
                "[kernels.nf4] found a weight {} of {} on {}, wanted floating numbers [out, in] on the CPU",
                c10::str(values.sizes()), c10::toString(values.scalar_type()), values.device().str());
  const c10::NoGradGuard no_grad;
  const auto whole = values.to(at::kFloat).contiguous();
  const int64_t count = whole.numel(), blocks = blocks_of(count, kNf4Block);
  QuantizedWeight out;
  out.out_ = values.size(0);
  out.in_ = out.row_elements_ = values.size(1);
  out.table_ = nf4_table();
  out.packed_ = at::empty({(count + 1) / 2}, at::kByte);
  out.absmax_ = at::empty({blocks}, at::kFloat);
  const auto* const from = whole.const_data_ptr<float>();
  auto* const packed = out.packed_.mutable_data_ptr<uint8_t>();
  auto* const largest = out.absmax_.mutable_data_ptr<float>();
  // Each thread encodes whole blocks. The number of elements before a block is even and a byte holds two codes, so no
  // two threads write the same byte.
  at::parallel_for(0, blocks, 64, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kNf4Block, size = std::min(kNf4Block, count - first);
      float most = 0;
      for (int64_t i = 0; i < size; ++i) most = std::max(most, std::abs(from[first + i]));
      largest[block] = most;
      encode_nf4(from + first, size, most, packed + first / 2);
    }
  });
  TESSERA_CHECK(at::isfinite(out.absmax_).all().item<bool>() && !at::isnan(whole).any().item<bool>(),
                ErrorKind::kFormat,
                "[kernels.nf4] found a weight {} with values that are not finite, wanted finite values",
                c10::str(values.sizes()));
  if (!options.double_quant || blocks == 0) return out;
  // The scales are not negative. After their mean is subtracted they have both signs and use all values of scale_map(),
  // which is signed.
  out.mean_ = out.absmax_.mean().item<float>();
  std::tie(out.absmax_, out.nested_absmax_) = to_8_bits(out.absmax_ - out.mean_);
  out.map_ = scale_map();
  return out;
}

QuantizedWeight QuantizedWeight::gguf(GgmlType type, at::Tensor rows, int64_t in) {
  const auto* const info = ggml_type_info(static_cast<uint32_t>(type));
  TESSERA_CHECK(
      info != nullptr && info->decodes, ErrorKind::kFormat,
      "[kernels.quantized] found {}, which cannot be decoded. Requantise the file with llama.cpp, for example to Q4_K.",
      info == nullptr ? "an unknown type" : info->name);
  const int64_t block = info->block_elements;
  TESSERA_CHECK(rows.dim() == 2 && rows.scalar_type() == at::kByte && rows.is_cpu() && rows.is_contiguous() &&
                    in % block == 0 && rows.size(1) == in / block * info->block_bytes,
                ErrorKind::kShape,
                "[kernels.quantized] rows of {} elements as {}: found {} of {}, wanted bytes [out, {}]", in, info->name,
                c10::str(rows.sizes()), c10::toString(rows.scalar_type()), blocks_of(in, block) * info->block_bytes);
  QuantizedWeight out;
  out.out_ = rows.size(0);
  out.in_ = out.row_elements_ = in;
  out.type_ = type;
  out.packed_ = std::move(rows);
  return out;
}

int64_t QuantizedWeight::size_bytes() const {
  int64_t bytes = 0;
  for (const auto* part : {&packed_, &absmax_, &nested_absmax_}) {
    if (part->defined()) bytes += static_cast<int64_t>(part->nbytes());
  }
  return bytes;
}

QuantizedWeight QuantizedWeight::to(c10::Device device) const {
  QuantizedWeight out = *this;
  for (auto* part : {&out.packed_, &out.absmax_, &out.nested_absmax_, &out.table_, &out.map_}) {
    if (part->defined()) *part = part->to(device);
  }
  return out;
}

// part() changes only the range of rows or columns that the weight covers; the result shares the packed bytes with this
// weight. rows() decodes whole packed rows and then cuts out the columns of the range.
QuantizedWeight QuantizedWeight::part(int64_t dim, int64_t begin, int64_t size) const {
  auto out = *this;
  auto& extent = dim == 0 ? out.out_ : out.in_;
  TESSERA_CHECK((dim == 0 || dim == 1) && begin >= 0 && size >= 0 && begin + size <= extent, ErrorKind::kShape,
                "[kernels.quantized] dim {}: found the range [{}, {}), wanted a range inside a weight [{}, {}]", dim,
                begin, begin + size, out_, in_);
  extent = size;
  (dim == 0 ? out.first_row_ : out.first_column_) += begin;
  return out;
}

// Returns the scales of NF4 blocks [first_block, first_block + blocks), float32. Scales that are 8-bit codes are
// decoded.
at::Tensor QuantizedWeight::absmax_of(int64_t first_block, int64_t blocks) const {
  const auto own = absmax_.narrow(0, first_block, blocks);
  if (!nested_absmax_.defined()) return own;
  const int64_t first = first_block / kNestedBlock, end = blocks_of(first_block + blocks, kNestedBlock);
  const auto scale = nested_absmax_.narrow(0, first, end - first)
                         .unsqueeze(1)
                         .expand({end - first, kNestedBlock})
                         .reshape({-1})
                         .narrow(0, first_block - first * kNestedBlock, blocks);
  return map_.index_select(0, own.to(at::kInt)).mul_(scale).add_(mean_);
}

at::Tensor QuantizedWeight::absmax() const { return absmax_of(0, absmax_.numel()); }

// Decodes rows [first, first + count) of the packed weight with all columns. A row need not begin at the start of a
// block, so the scales are read from the block in which its first element is.
at::Tensor QuantizedWeight::nf4_rows(int64_t first, int64_t count) const {
  const int64_t begin = first * row_elements_, elements = count * row_elements_, end = begin + elements;
  if (elements == 0) return at::empty({count, row_elements_}, packed_.options().dtype(at::kFloat));
  const int64_t first_block = begin / kNf4Block;
  const auto largest = absmax_of(first_block, blocks_of(end, kNf4Block) - first_block).contiguous();
  if (!packed_.is_cpu()) {
    const int64_t first_element = first_block * kNf4Block;  // an even number
    const auto codes = packed_.narrow(0, first_element / 2, (end + 1) / 2 - first_element / 2);
    return decode_codes(codes, largest, table_, kNf4Block, end - first_element)
        .narrow(0, begin - first_element, elements)
        .view({count, row_elements_});
  }
  auto values = at::empty({count, row_elements_}, at::kFloat);
  const auto* const packed = packed_.const_data_ptr<uint8_t>();
  const auto* const scales = largest.const_data_ptr<float>();
  auto* const out = values.mutable_data_ptr<float>();
  at::parallel_for(begin, end, 4096, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const uint8_t both = packed[i / 2];
      out[i - begin] = kNf4[i % 2 == 0 ? both >> 4 : both & 15] * scales[i / kNf4Block - first_block];
    }
  });
  return values;
}

at::Tensor QuantizedWeight::gguf_rows(int64_t first, int64_t count) const {
  if (!packed_.is_cpu()) return decode_gguf_rows(*type_, packed_.narrow(0, first, count), row_elements_);
  auto values = at::empty({count, row_elements_}, at::kFloat);
  auto* const data = values.mutable_data_ptr<float>();
  const int64_t row_bytes = packed_.size(1), in = row_elements_;
  const auto* const bytes = reinterpret_cast<const std::byte*>(packed_.const_data_ptr<uint8_t>());
  at::parallel_for(0, count, std::max<int64_t>(1, 4096 / std::max<int64_t>(in, 1)), [&](int64_t begin, int64_t end) {
    const auto rows = static_cast<size_t>(end - begin);
    dequantize(*type_, {bytes + (first + begin) * row_bytes, rows * static_cast<size_t>(row_bytes)},
               {data + begin * in, rows * static_cast<size_t>(in)});
  });
  return values;
}

at::Tensor QuantizedWeight::rows(int64_t first, int64_t count) const {
  TESSERA_CHECK(defined() && first >= 0 && count >= 0 && first + count <= out_, ErrorKind::kInternal,
                "[kernels.quantized] found the rows {} to {}, wanted rows inside the {} rows of the weight", first,
                first + count, out_);
  const c10::NoGradGuard no_grad;
  const auto values = type_ ? gguf_rows(first_row_ + first, count) : nf4_rows(first_row_ + first, count);
  return in_ == row_elements_ ? values : values.narrow(1, first_column_, in_);
}

}  // namespace tessera::kernels
