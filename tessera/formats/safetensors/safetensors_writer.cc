#include "tessera/formats/safetensors/safetensors_writer.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

uint64_t size_bytes(const SafetensorsSpec& spec) {
  if (std::ranges::find(spec.shape, 0) != spec.shape.end()) return 0;  // even if the other sizes overflow
  return c10::elementSize(spec.dtype) * static_cast<uint64_t>(c10::multiply_integers(spec.shape));
}

}  // namespace

// The header is written first: all sizes are known, so each tensor's position is fixed before its values arrive.
// Sorting by item size keeps every tensor aligned, because the data begins at a multiple of 8 bytes.
SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsSpec> specs,
                                     const SafetensorsMetadata& metadata)
    : file_(path) {
  std::ranges::sort(specs, [](const SafetensorsSpec& a, const SafetensorsSpec& b) {
    const auto a_size = c10::elementSize(a.dtype), b_size = c10::elementSize(b.dtype);
    return a_size != b_size ? a_size > b_size : a.name < b.name;
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const auto& spec : specs) {
    TESSERA_CHECK(spec.name != "__metadata__" && !announced_.contains(spec.name), ErrorKind::kFormat,
                  "[safetensors] {}: the name {} cannot be written twice or is reserved", path.string(),
                  quote(spec.name));
    const uint64_t end = offset + size_bytes(spec);
    header[spec.name] = {
        {"dtype", safetensors_dtype_name(spec.dtype)}, {"shape", spec.shape}, {"data_offsets", {offset, end}}};
    announced_[spec.name].entry = {spec.dtype, spec.shape, offset, end};
    offset = end;
  }
  auto text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t header_bytes = text.size();
  file_.write_at(0, std::as_bytes(std::span(&header_bytes, 1)));
  file_.write_at(8, std::as_bytes(std::span(text)));
  for (auto& [name, announced] : announced_) {
    announced.entry.begin += 8 + header_bytes;
    announced.entry.end += 8 + header_bytes;
  }
}

// The position of each tensor is fixed by the header, so tensors may arrive in any order.
void SafetensorsWriter::write(std::string_view name, const at::Tensor& tensor) {
  const auto found = announced_.find(name);
  TESSERA_CHECK(found != announced_.end() && !found->second.written, ErrorKind::kInternal,
                "[safetensors] {}: tensor {} was not announced or is written twice", file_.path().string(),
                quote(name));
  const auto& entry = found->second.entry;
  TESSERA_CHECK(tensor.scalar_type() == entry.dtype && tensor.sizes() == at::IntArrayRef(entry.shape),
                ErrorKind::kShape, "[safetensors] {}: tensor {} is {} [{}], but {} [{}] was announced",
                file_.path().string(), quote(name), c10::toString(tensor.scalar_type()),
                fmt::join(tensor.sizes(), ", "), c10::toString(entry.dtype), fmt::join(entry.shape, ", "));
  const auto plain = tensor.detach().cpu().contiguous();
  file_.write_at(entry.begin, {static_cast<const std::byte*>(plain.const_data_ptr()), plain.nbytes()});
  found->second.written = true;
}

void SafetensorsWriter::finish() {
  for (const auto& [name, announced] : announced_) {
    TESSERA_CHECK(announced.written || announced.entry.size_bytes() == 0, ErrorKind::kInternal,
                  "[safetensors] {}: tensor {} was announced but not written", file_.path().string(), quote(name));
  }
  file_.publish();
}

// Fills shards in the order of the specs: a tensor that does not fit begins a new shard. Shard names contain their
// number, so they are set after the last tensor is placed.
SafetensorsFolderWriter::SafetensorsFolderWriter(std::filesystem::path dir, std::vector<SafetensorsSpec> specs,
                                                 SafetensorsFolderOptions options)
    : dir_(std::move(dir)), options_(std::move(options)) {
  uint64_t shard_bytes = 0;
  for (auto& spec : specs) {
    const uint64_t bytes = size_bytes(spec);
    if (shards_.empty() || (shard_bytes > 0 && shard_bytes + bytes > options_.max_shard_bytes)) {
      shards_.emplace_back();
      shard_bytes = 0;
    }
    shard_bytes += bytes;
    total_bytes_ += bytes;
    TESSERA_CHECK(shard_of_.emplace(spec.name, shards_.size() - 1).second, ErrorKind::kFormat,
                  "[safetensors] {}: the name {} cannot be written twice", dir_.string(), quote(spec.name));
    shards_.back().specs.push_back(std::move(spec));
  }
  if (shards_.empty()) shards_.emplace_back();
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].file_name = shards_.size() == 1 ? "model.safetensors"
                                               : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards_.size());
  }
}

void SafetensorsFolderWriter::write(std::string_view name, const at::Tensor& tensor) {
  const auto found = shard_of_.find(name);
  TESSERA_CHECK(found != shard_of_.end(), ErrorKind::kInternal, "[safetensors] {}: tensor {} was not announced",
                dir_.string(), quote(name));
  writer_of(shards_[found->second]).write(name, tensor);
}

SafetensorsWriter& SafetensorsFolderWriter::writer_of(Shard& shard) const {
  if (!shard.writer) {
    shard.writer = std::make_unique<SafetensorsWriter>(dir_ / shard.file_name, shard.specs, options_.metadata);
  }
  return *shard.writer;
}

// The index is written after all shards are published, so a folder with an index has all its shards.
void SafetensorsFolderWriter::finish() {
  nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes_}}},
                                  {"weight_map", nlohmann::ordered_json::object()}};
  for (const auto& [name, shard] : shard_of_) index["weight_map"][name] = shards_[shard].file_name;
  for (auto& shard : shards_) {
    writer_of(shard).finish();
    shard.writer.reset();
  }
  if (shards_.size() > 1) publish_file(dir_ / "model.safetensors.index.json", index.dump(2) + "\n");
}

}  // namespace tessera
