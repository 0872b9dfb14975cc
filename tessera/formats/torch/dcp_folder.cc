#include "tessera/formats/torch/dcp_folder.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/mapped_file.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/detail/boxes.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetadata = ".metadata";
constexpr size_t kMetadataBytes = size_t{1} << 30;

fs::path rank_metadata(const fs::path& folder, int rank) { return folder / fmt::format("__{}.metadata", rank); }

// Merges the metadata of another rank into `all`. Ranks are merged in ascending order, and a chunk or object that an
// earlier rank has too is dropped with its record, so it is read from the lowest rank. `known` holds the names and
// offsets of all merged chunks and objects. In `known` a tensor's name ends with "/", because a chunk of a 0-d tensor
// has an empty offset, as an object has.
void merge_metadata(DcpMetadata& all, DcpMetadata more, std::set<std::pair<std::string, std::vector<int64_t>>>& known) {
  const auto is_new = [&](const std::string& name, const std::vector<int64_t>& at) {
    return known.insert({name, at}).second;
  };
  std::map<std::string, size_t> position;
  for (size_t i = 0; i < all.entries.size(); ++i) position[all.entries[i].name] = i;
  std::set<std::pair<std::string, std::vector<int64_t>>> added;
  for (auto& entry : more.entries) {
    const auto found = position.find(entry.name);
    auto* into = found == position.end() ? nullptr : &all.entries[found->second];
    TESSERA_CHECK(!into || into->tensor.has_value() == entry.tensor.has_value(), ErrorKind::kFormat,
                  "[dcp.read] {}: is a tensor for one rank and an object for another", quote(entry.name));
    if (!entry.tensor) {
      if (is_new(entry.name, {})) added.insert({entry.name, {}}), all.entries.push_back(std::move(entry));
      continue;
    }
    TESSERA_CHECK(!into || (into->tensor->size == entry.tensor->size && into->tensor->dtype == entry.tensor->dtype),
                  ErrorKind::kFormat, "[dcp.read] {}: {} [{}] for one rank, {} [{}] for another", quote(entry.name),
                  c10::toString(into->tensor->dtype), fmt::join(into->tensor->size, ", "),
                  c10::toString(entry.tensor->dtype), fmt::join(entry.tensor->size, ", "));
    auto chunks = std::exchange(entry.tensor->chunks, {});
    std::erase_if(chunks, [&](const DcpChunk& chunk) { return !is_new(entry.name + "/", chunk.offsets); });
    for (const auto& chunk : chunks) added.insert({entry.name, chunk.offsets});
    if (!into) into = &all.entries.emplace_back(std::move(entry));
    into->tensor->chunks.insert(into->tensor->chunks.end(), chunks.begin(), chunks.end());
  }
  if (more.planner_data) {
    std::set<std::string> placed;
    if (!all.planner_data) all.planner_data.emplace();
    for (const auto& [name, path] : *all.planner_data) placed.insert(name);
    for (auto& each : *more.planner_data) {
      if (placed.insert(each.first).second) all.planner_data->push_back(std::move(each));
    }
  }
  if (!all.version) all.version = more.version;
  if (!all.storage_meta) all.storage_meta = more.storage_meta;
  for (auto& [index, place] : more.storage_data) {
    if (added.contains({index.name, index.offset.value_or(std::vector<int64_t>())})) {
      all.storage_data.emplace_back(std::move(index), std::move(place));
    }
  }
}

DcpMetadata read_metadata(const fs::path& folder) {
  if (const auto path = folder / kMetadata; fs::exists(path)) {
    return DcpMetadata::parse(read_file(path, kMetadataBytes), path.string());
  }
  TESSERA_CHECK(fs::exists(rank_metadata(folder, 0)), ErrorKind::kFormat,
                "[dcp.read] {}: holds no .metadata. Either it is no checkpoint of torch.distributed.checkpoint, or its "
                "save was interrupted.",
                folder.string());
  DcpMetadata all;
  std::set<std::pair<std::string, std::vector<int64_t>>> known;
  for (int rank = 0; fs::exists(rank_metadata(folder, rank)); ++rank) {
    const auto path = rank_metadata(folder, rank);
    merge_metadata(
        all, DcpMetadata::parse(read_file(path, kMetadataBytes), path.string(), DcpParseOptions{.allow_gaps = true}),
        known);
  }
  all.check(folder.string());
  return all;
}

}  // namespace

bool DcpFolder::is_dcp_folder(const fs::path& path) {
  return fs::exists(path / kMetadata) || fs::exists(rank_metadata(path, 0));
}

DcpFolder::DcpFolder(fs::path path, DcpMetadata metadata)
    : path_(std::move(path)), metadata_(std::move(metadata)), lookup_(metadata_) {}

std::shared_ptr<const DcpFolder> DcpFolder::open(const fs::path& path) {
  std::shared_ptr<DcpFolder> folder(new DcpFolder(path, read_metadata(path)));
  folder->check_files();
  return folder;
}

void DcpFolder::check_files() const {
  std::map<std::string, uint64_t> wanted;  // bytes of each file
  for (const auto& [index, place] : metadata_.storage_data) {
    TESSERA_CHECK(place.transform_descriptors.empty(), ErrorKind::kFormat,
                  "[dcp.read] {}: the record of {} was transformed by an extension ({}), which this program cannot "
                  "undo. Load it with torch and save it without extensions.",
                  (path_ / place.relative_path).string(), quote(index.name),
                  quote(fmt::format("{}", fmt::join(place.transform_descriptors, ", "))));
    auto& bytes = wanted[place.relative_path];
    bytes = std::max(bytes, place.offset + place.length);
  }
  for (const auto& [name, bytes] : wanted) {
    std::error_code failed;
    const auto found = fs::file_size(path_ / name, failed);
    TESSERA_CHECK(!failed, ErrorKind::kFormat,
                  "[dcp.read] {}: {}, but .metadata names it. The checkpoint is damaged; take another one.",
                  (path_ / name).string(), failed.message());
    TESSERA_CHECK(
        found >= bytes, ErrorKind::kFormat,
        "[dcp.read] {}: found {} bytes, but .metadata refers to {} bytes. The checkpoint is damaged; take another one.",
        (path_ / name).string(), found, bytes);
  }
}

const DcpTensor* DcpFolder::find_tensor(std::string_view name) const {
  const auto* entry = lookup_.find(name);
  return entry && entry->tensor ? &*entry->tensor : nullptr;
}

// Returns the record at `place`. Its file is mapped at the first use. The mappings stay in files_ and are shared by
// threads, so files_ is accessed under `mutex_`; the mapped bytes are read without the lock.
DcpFolder::MappedRecord DcpFolder::record(const DcpStorageInfo& place) const {
  MappedRecord record;
  record.where = fmt::format("{} at byte {}", (path_ / place.relative_path).string(), place.offset);
  {
    const std::lock_guard lock(mutex_);
    auto& file = files_[place.relative_path];
    if (!file) file = MappedFile::open(path_ / place.relative_path);
    record.file = file;
  }
  const auto bytes = record.file->bytes();
  TESSERA_CHECK(place.offset <= bytes.size() && place.length <= bytes.size() - place.offset, ErrorKind::kFormat,
                "[dcp.read] {}: .metadata has a record of {} bytes here, but the file has {} bytes in all",
                record.where, place.length, bytes.size());
  record.bytes = bytes.subspan(place.offset, place.length);
  record.parsed = TorchRecord::parse(record.bytes, record.where);
  return record;
}

// A record must hold the tensor that .metadata promises: same dtype, and the chunk's sizes.
TorchTensorInfo DcpFolder::chunk_info(const MappedRecord& found, const std::string& name, const DcpTensor& tensor,
                                      const DcpChunk& chunk) const {
  const auto* info = found.parsed.find_tensor(found.parsed.root());
  TESSERA_CHECK(info, ErrorKind::kFormat, "[dcp.read] {}: {}, wanted a tensor, a part of {}", found.where,
                found.parsed.root().describe(), quote(name));
  TESSERA_CHECK(info->dtype == tensor.dtype && info->sizes == chunk.sizes, ErrorKind::kFormat,
                "[dcp.read] {}: {} [{}], .metadata says {} [{}], a part of {}. The checkpoint is damaged.", found.where,
                c10::toString(info->dtype), fmt::join(info->sizes, ", "), c10::toString(tensor.dtype),
                fmt::join(chunk.sizes, ", "), quote(name));
  return *info;
}

at::Tensor DcpFolder::chunk(const std::string& name, const DcpTensor& tensor, const DcpChunk& chunk) const {
  const auto found = record(lookup_.storage(name, chunk.offsets));
  return record_tensor(found.bytes, chunk_info(found, name, tensor, chunk), found.file);
}

// Parses the record of the chunk. With Check::kValues also compares the CRC-32 of the chunk's values with the checksum
// in the record, if there is one; Error kFormat when they differ. Returns whether the record has a checksum of the
// values; true for a chunk without elements.
bool DcpFolder::check_chunk(const std::string& name, const DcpTensor& tensor, const DcpChunk& chunk,
                            Check check_kind) const {
  const auto found = record(lookup_.storage(name, chunk.offsets));
  const auto info = chunk_info(found, name, tensor, chunk);
  if (check_kind == Check::kValues) {
    check_storage_crc(found.bytes, info, fmt::format("{}, {}", found.where, quote(name)));
  }
  return info.storage_crc != 0 || info.numel() == 0;
}

// The chunks cover the tensor exactly once, which open() has checked. So the intersections of the box with all chunks
// fill the whole box. Only the records of chunks that share elements with the box are opened.
void DcpFolder::read(std::string_view name, c10::IntArrayRef offset, const at::Tensor& into) const {
  const auto& entry = lookup_.at(name);
  TESSERA_CHECK(entry.tensor, ErrorKind::kShape, "[dcp.read] {}: {} is no tensor", path_.string(), quote(name));
  const auto& tensor = *entry.tensor;
  TESSERA_CHECK(detail::is_box_inside(offset, into.sizes(), tensor.size), ErrorKind::kShape,
                "[dcp.read] {}: {}: wanted [{}] from [{}] on, saved [{}]", path_.string(), quote(name),
                fmt::join(into.sizes(), ", "), fmt::join(offset, ", "), fmt::join(tensor.size, ", "));
  const at::NoGradGuard no_grad;
  for (const auto& part : tensor.chunks) {
    if (!detail::boxes_overlap(part.offsets, part.sizes, offset, into.sizes())) continue;
    detail::copy_intersection(chunk(entry.name, tensor, part), part.offsets, into, offset);
  }
}

at::Tensor DcpFolder::tensor(std::string_view name) const {
  const auto& entry = lookup_.at(name);
  TESSERA_CHECK(entry.tensor, ErrorKind::kShape, "[dcp.read] {}: {} is no tensor", path_.string(), quote(name));
  const auto whole = at::empty(entry.tensor->size, at::TensorOptions(entry.tensor->dtype));
  read(name, std::vector<int64_t>(entry.tensor->size.size(), 0), whole);
  return whole;
}

PickleValue DcpFolder::object(std::string_view name) const {
  TESSERA_CHECK(!lookup_.at(name).tensor, ErrorKind::kShape, "[dcp.read] {}: {} is a tensor", path_.string(),
                quote(name));
  return record(lookup_.storage(name)).parsed.root();
}

size_t DcpFolder::check_records(Check check_kind, size_t part, size_t parts) const {
  size_t number = 0, unknown = 0;
  const auto is_ours = [&] { return number++ % parts == part; };
  for (const auto& entry : metadata_.entries) {
    if (!entry.tensor) {
      if (is_ours()) record(lookup_.storage(entry.name));
      continue;
    }
    for (const auto& each : entry.tensor->chunks) {
      if (is_ours() && !check_chunk(entry.name, *entry.tensor, each, check_kind)) ++unknown;
    }
  }
  return unknown;
}

}  // namespace tessera
