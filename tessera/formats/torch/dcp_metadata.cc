// The checks of DcpMetadata, whether it was parsed or created by this library, and DcpLookup.
#include "tessera/formats/torch/dcp_metadata.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/folder_links.h"
#include "tessera/formats/torch/box_cover.h"
#include "tessera/formats/torch/torch_dtypes.h"

namespace tessera {
namespace {

constexpr size_t kMaxDcpDims = 64;

template <class... Args>
[[noreturn]] void raise_dcp_error(const std::string& where, fmt::format_string<Args...> format, Args&&... args) {
  raise(ErrorKind::kFormat, "[dcp] {}: {}", where, fmt::format(format, std::forward<Args>(args)...));
}

std::string format_list(const std::vector<int64_t>& values) { return fmt::format("[{}]", fmt::join(values, ", ")); }

// The size in bytes must not overflow. Only for an empty tensor (with a size of 0) may the product of its other sizes
// overflow, as in torch.
void check_whole_size(const DcpTensor& tensor, const std::string& where) {
  if (tensor.size.size() > kMaxDcpDims) raise_dcp_error(where, "a tensor of {} dimensions", tensor.size.size());
  torch_dtype_name(tensor.dtype);
  bool fits = true, empty = false;
  auto bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const int64_t size : tensor.size) {
    if (size < 0) raise_dcp_error(where, "a tensor of size {}", format_list(tensor.size));
    empty = empty || size == 0;
    fits = fits && !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
  }
  if (!fits && !empty) raise_dcp_error(where, "a tensor of size {} has more than 2^63 bytes", format_list(tensor.size));
}

void check_chunk_inside(const DcpTensor& tensor, const DcpChunk& chunk, const std::string& where) {
  if (!is_chunk_inside(chunk, tensor.size)) {
    raise_dcp_error(where, "the chunk at {} of size {} is not inside the tensor of size {}", format_list(chunk.offsets),
                    format_list(chunk.sizes), format_list(tensor.size));
  }
}

void check_dcp_tensor(const DcpTensor& tensor, const std::string& where, const DcpParseOptions& options) {
  check_whole_size(tensor, where);
  for (const auto& chunk : tensor.chunks) check_chunk_inside(tensor, chunk, where);
  if (tensor.memory_format < 0 || tensor.memory_format > 2) {
    raise_dcp_error(where, "memory format {}, 0 to 2 are known", tensor.memory_format);
  }
  if (options.allow_gaps) {
    if (const auto pair = find_overlap(tensor.chunks, "[dcp] " + where)) {
      raise_dcp_error(where, "the chunks at {} and at {} overlap", format_list(tensor.chunks[pair->first].offsets),
                      format_list(tensor.chunks[pair->second].offsets));
    }
    return;
  }
  if (const auto defect = find_cover_defect(tensor.size, tensor.chunks, where)) {
    raise_dcp_error(where,
                    "element {} is in {} of its {} chunks, wanted one. The checkpoint is damaged, or it is one "
                    "rank's part of a checkpoint.",
                    format_list(defect->element), defect->covered_by, tensor.chunks.size());
  }
}

void check_relative_path(const std::string& path, const std::string& where) {
  if (!is_path_inside_folder(path)) raise_dcp_error(where, "{} is no path inside the checkpoint's folder", quote(path));
}

void check_storage_info(const DcpStorageInfo& info, const std::string& where) {
  check_relative_path(info.relative_path, where);
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  if (info.offset > kMost || info.length > kMost - info.offset) {
    raise_dcp_error(where, "a record at bytes {} + {} of {}", info.offset, info.length, quote(info.relative_path));
  }
}

}  // namespace

// Duplicate names, paths and records are rejected first, because DcpLookup keeps only one of them. Then the record of
// every object and every chunk is looked up.
void DcpMetadata::check(const std::string& where, const DcpParseOptions& options) const {
  std::unordered_set<std::string_view> names;
  for (const auto& entry : entries) {
    if (!names.insert(entry.name).second) raise_dcp_error(where, "{} is there twice", quote(entry.name));
  }
  names.clear();
  for (const auto& [index, info] : storage_data) check_storage_info(info, where + ": " + quote(index.name));
  if (planner_data) {
    for (const auto& [name, path] : *planner_data) {
      if (!names.insert(name).second) raise_dcp_error(where, "{} has two paths", quote(name));
    }
  }
  const DcpLookup lookup(*this);
  if (lookup.storage_size() != storage_data.size()) {
    raise_dcp_error(where, "{} records are listed, but only {} of them are of different chunks", storage_data.size(),
                    lookup.storage_size());
  }
  for (const auto& entry : entries) {
    const auto at = where + ": " + quote(entry.name);
    if (!entry.tensor) {
      if (!lookup.find_storage(entry.name)) raise_dcp_error(at, "no record holds it");
      continue;
    }
    check_dcp_tensor(*entry.tensor, at, options);
    for (const auto& chunk : entry.tensor->chunks) {
      if (!lookup.find_storage(entry.name, chunk.offsets)) {
        raise_dcp_error(at, "no record holds its chunk at {}", format_list(chunk.offsets));
      }
    }
  }
}

bool DcpLookup::ChunkKey::operator==(const ChunkKey& other) const {
  if (name != other.name || (offset == nullptr) != (other.offset == nullptr)) return false;
  return offset == nullptr || *offset == *other.offset;
}

size_t DcpLookup::ChunkKeyHash::operator()(const ChunkKey& key) const {
  size_t hash = std::hash<std::string_view>{}(key.name) ^ (key.offset ? 1 : 0);
  if (!key.offset) return hash;
  const auto& offset = *key.offset;
  const std::string_view bytes(reinterpret_cast<const char*>(offset.data()), offset.size() * sizeof(int64_t));
  return hash * 31 + std::hash<std::string_view>{}(bytes);
}

// The keys and values of entries_, storage_ and paths_ point into `metadata`. emplace() keeps the first of equal keys;
// check() finds duplicate records by comparing storage_size() with the number of records.
DcpLookup::DcpLookup(const DcpMetadata& metadata) {
  for (const auto& entry : metadata.entries) entries_.emplace(entry.name, &entry);
  for (const auto& [index, info] : metadata.storage_data) {
    storage_.emplace(ChunkKey{index.name, index.offset ? &*index.offset : nullptr}, &info);
  }
  if (!metadata.planner_data) return;
  for (const auto& [name, path] : *metadata.planner_data) paths_.emplace(name, &path);
}

const DcpEntry* DcpLookup::find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : found->second;
}

const DcpPath* DcpLookup::find_path(std::string_view name) const {
  const auto found = paths_.find(name);
  return found == paths_.end() ? nullptr : found->second;
}

const DcpStorageInfo* DcpLookup::find_storage(std::string_view name, const std::vector<int64_t>& offset) const {
  const auto found = storage_.find({name, &offset});
  return found == storage_.end() ? nullptr : found->second;
}

const DcpStorageInfo* DcpLookup::find_storage(std::string_view name) const {
  const auto found = storage_.find({name, nullptr});
  return found == storage_.end() ? nullptr : found->second;
}

const DcpEntry& DcpLookup::at(std::string_view name) const {
  const auto* entry = find(name);
  TESSERA_CHECK(entry, ErrorKind::kFormat, "[dcp] the checkpoint holds no {}. List it with 'tessera ckpt ls PATH'.",
                quote(name));
  return *entry;
}

const DcpStorageInfo& DcpLookup::storage(std::string_view name, const std::vector<int64_t>& offset) const {
  const auto* info = find_storage(name, offset);
  TESSERA_CHECK(info, ErrorKind::kFormat, "[dcp] no record holds the chunk of {} at {}", quote(name),
                format_list(offset));
  return *info;
}

const DcpStorageInfo& DcpLookup::storage(std::string_view name) const {
  const auto* info = find_storage(name);
  TESSERA_CHECK(info, ErrorKind::kFormat, "[dcp] no record holds the object {}", quote(name));
  return *info;
}

}  // namespace tessera
