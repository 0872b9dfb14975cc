#include "tessera/formats/gguf/gguf_writer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

constexpr uint64_t kAlignment = 32;

// Appends a number in its own size, or a bool as one byte.
template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put(std::string& out, const std::string& text) {
  put(out, static_cast<uint64_t>(text.size()));
  out += text;
}

// Appends the element type, the count and the items. The index of a variant alternative is its type number in the file
// (see GgufValue).
void put(std::string& out, const GgufArray& array) {
  put(out, static_cast<uint32_t>(array.items.index()));
  std::visit(
      [&](const auto& items) {
        put(out, static_cast<uint64_t>(items.size()));
        for (const auto& item : items) put(out, item);
      },
      array.items);
}

void put(std::string& out, const GgufValue& value) {
  put(out, static_cast<uint32_t>(value.index()));
  std::visit([&](const auto& alternative) { put(out, alternative); }, value);
}

at::Tensor quantized_q8_0(const at::Tensor& tensor) {
  const auto values = tensor.to(at::kFloat).contiguous();
  const int64_t blocks = values.numel() / 32;
  auto out = at::empty({blocks * 34}, at::kByte);
  const float* in = values.const_data_ptr<float>();
  auto* bytes = static_cast<std::byte*>(out.data_ptr());
  at::parallel_for(0, blocks, 4096, [&](int64_t begin, int64_t end) {
    const auto first = static_cast<size_t>(begin), count = static_cast<size_t>(end - begin);
    quantize_q8_0({in + first * 32, count * 32}, {bytes + first * 34, count * 34});
  });
  return out;
}

// Returns the tensor's values in the type that the file stores: converted, or quantised from float32.
at::Tensor encoded(const at::Tensor& tensor, GgmlType type) {
  const auto plain = tensor.detach().cpu();
  const auto dtype = plain_dtype(type);
  return dtype ? plain.to(*dtype).contiguous() : quantized_q8_0(plain);
}

}  // namespace

void GgufWriter::set(const std::string& key, GgufValue value) {
  const bool known = std::ranges::any_of(metadata_, [&](const auto& item) { return item.first == key; });
  TESSERA_CHECK(!known && !header_written_, ErrorKind::kInternal, "[gguf] {}: key {} is set twice or too late",
                file_.path().string(), quote(key));
  metadata_.emplace_back(key, std::move(value));
}

void GgufWriter::announce(const std::string& name, GgmlType type, std::vector<int64_t> shape) {
  const bool writable = plain_dtype(type) || type == GgmlType::kQ8_0;
  TESSERA_CHECK(writable && !header_written_ && !announced_.contains(name), ErrorKind::kInternal,
                "[gguf] {}: tensor {} is announced twice, too late or with a type that is not written",
                file_.path().string(), quote(name));
  const auto* known = ggml_type_info(static_cast<uint32_t>(type));
  uint64_t elements = 1;
  for (const int64_t size : shape) elements *= static_cast<uint64_t>(size);
  const int64_t row = shape.empty() ? 1 : shape.back();
  TESSERA_CHECK(shape.size() <= 4 && elements > 0 && row % known->block_elements == 0, ErrorKind::kShape,
                "[gguf] {}: tensor {} of shape [{}] cannot be stored as {}", file_.path().string(), quote(name),
                fmt::join(shape, ", "), known->name);
  const uint64_t end = data_bytes_ + elements / known->block_elements * known->block_bytes;
  announced_[name].info = {type, std::move(shape), data_bytes_, end};
  order_.push_back(name);
  data_bytes_ = (end + kAlignment - 1) / kAlignment * kAlignment;
}

// announce() has set the offsets of the tensors relative to the data section, and the header stores them so. When the
// length of the header is known, the offsets in `announced_` are changed to positions in the file, which write() needs.
void GgufWriter::write_header() {
  std::string header = "GGUF";
  put(header, uint32_t{3});
  put(header, static_cast<uint64_t>(order_.size()));
  put(header, static_cast<uint64_t>(metadata_.size()));
  for (const auto& [key, value] : metadata_) {
    put(header, key);
    put(header, value);
  }
  for (const auto& name : order_) {
    const auto& info = announced_.find(name)->second.info;
    put(header, name);
    put(header, static_cast<uint32_t>(info.shape.size()));
    for (auto size = info.shape.rbegin(); size != info.shape.rend(); ++size) put(header, static_cast<uint64_t>(*size));
    put(header, static_cast<uint32_t>(info.type));
    put(header, info.begin);
  }
  header.resize((header.size() + kAlignment - 1) / kAlignment * kAlignment, '\0');
  file_.write_at(0, std::as_bytes(std::span(header)));
  for (auto& [name, announced] : announced_) {
    announced.info.begin += header.size();
    announced.info.end += header.size();
  }
  data_bytes_ += header.size();
  header_written_ = true;
}

void GgufWriter::write(std::string_view name, const at::Tensor& tensor) {
  if (!header_written_) write_header();
  const auto found = announced_.find(name);
  TESSERA_CHECK(found != announced_.end() && !found->second.written, ErrorKind::kInternal,
                "[gguf] {}: tensor {} was not announced or is written twice", file_.path().string(), quote(name));
  auto& [info, written] = found->second;
  TESSERA_CHECK(tensor.sizes() == at::IntArrayRef(info.shape), ErrorKind::kShape,
                "[gguf] {}: tensor {} has shape [{}], but [{}] was announced", file_.path().string(), quote(name),
                fmt::join(tensor.sizes(), ", "), fmt::join(info.shape, ", "));
  const auto bytes = encoded(tensor, info.type);
  file_.write_at(info.begin, {static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.nbytes()});
  written = true;
}

void GgufWriter::finish() {
  if (!header_written_) write_header();
  uint64_t end = 0;
  for (const auto& [name, announced] : announced_) {
    TESSERA_CHECK(announced.written, ErrorKind::kInternal, "[gguf] {}: tensor {} was announced but not written",
                  file_.path().string(), quote(name));
    end = std::max(end, announced.info.end);
  }
  // The file ends at a multiple of the alignment, because the last tensor is padded like every other tensor.
  const std::string padding(static_cast<size_t>(data_bytes_ > end && end > 0 ? data_bytes_ - end : 0), '\0');
  file_.write_at(end, std::as_bytes(std::span(padding)));
  file_.publish();
}

}  // namespace tessera
