#include "tessera/checkpoint/rank_snapshot.h"

#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/random_hex.h"
#include "tessera/checkpoint/local_boxes.h"
#include "tessera/checkpoint/record_file.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/torch/pickler.h"
#include "tessera/formats/torch/torch_save_writer.h"
#include "tessera/state/pickled_state.h"

namespace tessera {
namespace {

constexpr JsonLimits kReportLimits{.max_bytes = size_t{1} << 30, .max_depth = 8, .max_keys = 20'000'000};

// This rank's boxes of a tensor, as views.
std::vector<RankSnapshot::SnapshotChunk> local_chunks(const at::Tensor& tensor) {
  const at::Tensor local = is_dtensor(tensor) ? to_local(tensor) : tensor;
  std::vector<RankSnapshot::SnapshotChunk> chunks;
  for (const auto& box : local_boxes(tensor)) chunks.push_back({box.offset, local_box_view(local.detach(), box)});
  return chunks;
}

// Returns the key by which plan_snapshot() recognises tied weights: they are one tensor object under two names.
const void* tensor_identity(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

nlohmann::json place_to_json(const DcpStorageInfo& place) { return {{"at", place.offset}, {"bytes", place.length}}; }

DcpStorageInfo place_in(const std::string& file, const JsonReader& json) {
  return {.relative_path = file, .offset = json.at("at").as_unsigned(), .length = json.at("bytes").as_unsigned()};
}

}  // namespace

CheckpointContents::CheckpointContents() {
  metadata.planner_data.emplace();
  metadata.storage_meta.emplace().save_id = random_hex(8);
  metadata.version = "1.0.0";
}

DcpEntry& CheckpointContents::entry_of(const std::string& name, const DcpPath& path) {
  const auto [found, is_new] = position.try_emplace(name, metadata.entries.size());
  if (!is_new) return metadata.entries[found->second];
  metadata.planner_data->emplace_back(name, path);
  return metadata.entries.emplace_back(DcpEntry{.name = name, .tensor = std::nullopt});
}

void CheckpointContents::add_chunk(DcpEntry& entry, DcpChunk box, DcpStorageInfo place) {
  auto& chunks = entry.tensor->chunks;
  const auto index = static_cast<int64_t>(chunks.size());
  metadata.storage_data.emplace_back(DcpIndex{.name = entry.name, .offset = box.offsets, .index = index},
                                     std::move(place));
  chunks.push_back(std::move(box));
}

// DcpMetadata::check() rejects metadata that DcpMetadata::parse() would reject, so a checkpoint that cannot be loaded
// is never published.
void CheckpointContents::publish_metadata(const std::filesystem::path& folder) {
  metadata.check(folder.string());
  const auto bytes = metadata.dump();
  publish_file(folder / ".metadata", bytes);
  files.push_back({".metadata", bytes.size(), hash_bytes(bytes)});
}

// torch's state dict has "model" and "optim" as dicts whose keys are flat FQNs, so only the first dot separates levels.
DcpPath planner_path(const std::string& name) {
  for (const std::string_view top : {"model", "optim"}) {
    if (name.starts_with(top) && name.size() > top.size() + 1 && name[top.size()] == '.') {
      return {std::string(top), name.substr(top.size() + 1)};
    }
  }
  return {name};
}

void check_placements(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    if (!is_dtensor(tensor)) continue;
    for (const auto& placement : placements(tensor)) {
      TESSERA_CHECK(!placement.is_partial(), ErrorKind::kShape,
                    "[checkpoint.save] {}: placements {}; a partial tensor, which is still to be reduced, cannot be "
                    "saved. Redistribute it first.",
                    name, to_string(placements(tensor)));
    }
  }
}

// Every rank lists every tensor, even a tensor of which it writes no chunk, so that rank 0 learns of tensors that no
// rank wrote. A tensor without elements has one empty chunk, which the first holder writes.
RankSnapshot plan_snapshot(const NamedTensors& tensors, const NamedObjects& objects, WriterAssignment assignment) {
  const at::NoGradGuard no_grad;
  RankSnapshot snapshot;
  std::unordered_map<const void*, size_t> known;
  for (const auto& [name, tensor] : tensors) {
    auto& entry =
        snapshot.tensors.emplace_back(RankSnapshot::SnapshotTensor{name, tensor.scalar_type(), tensor.sizes().vec()});
    const auto [first, is_new] = known.try_emplace(tensor_identity(tensor), snapshot.tensors.size() - 1);
    if (!is_new) {
      entry.same_as = first->second;
    } else if (tensor.numel() == 0) {
      if (assignment.is_first_holder()) {
        entry.chunks.push_back(
            {std::vector<int64_t>(entry.shape.size(), 0), at::empty(entry.shape, at::TensorOptions(entry.dtype))});
      }
    } else if (assignment.assign(tensor, snapshot.tensors.size() - 1)) {
      entry.chunks = local_chunks(tensor);
    }
  }
  if (assignment.is_first_holder()) snapshot.objects = objects;
  return snapshot;
}

// A CPU tensor can be copied later by the writer thread, unless it was made in inference mode: such a tensor has no
// version counter, so SnapshotGate could not detect a change.
void copy_snapshot(RankSnapshot& snapshot, SnapshotPool& pool, DeviceCopies& copies, SnapshotCopyMode mode) {
  const at::NoGradGuard no_grad;
  for (auto& entry : snapshot.tensors) {
    for (auto& chunk : entry.chunks) {
      const bool can_wait = chunk.data.is_cpu() && !chunk.data.is_inference();
      if (chunk.is_copy || (mode == SnapshotCopyMode::kOnlyUndeferrable && can_wait)) continue;
      const auto entered = copies.enter_copy_stream(chunk.data);
      chunk.data = pool.copy(chunk.data);
      chunk.is_copy = true;
    }
  }
  copies.record_launched();
}

// Returns the memory of the copies to `pool`, which reuses it for the next snapshot.
void recycle_memory(const RankSnapshot& snapshot, SnapshotPool& pool) {
  for (const auto& entry : snapshot.tensors) {
    for (const auto& chunk : entry.chunks) {
      if (chunk.is_copy) pool.recycle(chunk.data);
    }
  }
}

std::string write_snapshot(const RankSnapshot& snapshot, const std::filesystem::path& staged, int rank) {
  RecordFile file(staged / fmt::format("__{}_0.distcp", rank));
  nlohmann::json tensors = nlohmann::json::array(), objects = nlohmann::json::array();
  for (const auto& entry : snapshot.tensors) {
    nlohmann::json chunks = nlohmann::json::array();
    for (const auto& chunk : entry.chunks) {
      const auto data = chunk.data.contiguous();
      const auto place = file.append([&](const ByteSink& sink) { write_tensor_record(data, sink); });
      chunks.push_back(place_to_json(place));
      chunks.back()["offset"] = chunk.offset;
      chunks.back()["shape"] = chunk.data.sizes().vec();
    }
    if (entry.same_as != RankSnapshot::kNotTied) chunks = tensors.at(entry.same_as).at("chunks");
    tensors.push_back({{"name", entry.name},
                       {"dtype", static_cast<int>(entry.dtype)},
                       {"shape", entry.shape},
                       {"chunks", std::move(chunks)}});
  }
  std::map<std::string, DcpStorageInfo> written;  // by pickle: equal objects share a record
  for (const auto& [name, value] : snapshot.objects) {
    const auto object = to_pickle(value);
    const auto [found, is_new] = written.try_emplace(pickle(object, {.protocol = 2}));
    if (is_new) found->second = file.append([&](const ByteSink& sink) { write_object_record(object, sink); });
    objects.push_back(place_to_json(found->second));
    objects.back()["name"] = name;
  }
  const auto done = file.publish();
  const nlohmann::json report = {{"file", done.name},
                                 {"bytes", done.size_bytes},
                                 {"xxh3", done.xxh3},
                                 {"tensors", std::move(tensors)},
                                 {"objects", std::move(objects)}};
  return report.dump();
}

std::string failure_report(int rank, const std::exception& error) {
  const nlohmann::json report = {{"error", fmt::format("rank {}: {}", rank, error.what())}};
  return report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

namespace {

// Adds one tensor of a rank's report to `contents`. All ranks that report a tensor must agree on its dtype and shape;
// its entry in `contents` collects the chunks of all these ranks. A dtype is sent as its number in c10::ScalarType, as
// all ranks run the same program.
void add_tensor(CheckpointContents& contents, const std::string& file, const JsonReader& report) {
  const std::string name = report.string("name");
  const auto dtype = report.at("dtype").as_unsigned();
  TESSERA_CHECK(dtype < static_cast<uint64_t>(c10::ScalarType::NumOptions), ErrorKind::kFormat, "{}: dtype {}",
                quote(name), dtype);
  DcpTensor reported;
  reported.dtype = static_cast<c10::ScalarType>(dtype);
  reported.size = report.integers("shape", 0, INT64_MAX);
  const bool is_new = !contents.position.contains(name);
  auto& entry =
      is_new ? contents.entry_of(name, planner_path(name)) : contents.metadata.entries[contents.position.at(name)];
  TESSERA_CHECK(is_new || entry.tensor, ErrorKind::kShape, "{}: is a tensor on one rank and an object on another",
                quote(name));
  if (is_new) entry.tensor = reported;
  const auto& tensor = *entry.tensor;
  TESSERA_CHECK(tensor.dtype == reported.dtype && tensor.size == reported.size, ErrorKind::kShape,
                "{}: {} [{}] on one rank, {} [{}] on another", name, c10::toString(tensor.dtype),
                fmt::join(tensor.size, ", "), c10::toString(reported.dtype), fmt::join(reported.size, ", "));
  for (const auto& chunk : report.at("chunks").items()) {
    contents.add_chunk(entry, {chunk.integers("offset", 0, INT64_MAX), chunk.integers("shape", 0, INT64_MAX)},
                       place_in(file, chunk));
  }
}

}  // namespace

void add_report(CheckpointContents& contents, const std::string& text) {
  const std::string where = fmt::format("report {}", contents.files.size());
  const Json json = parse_json_object(text, where, kReportLimits);
  const JsonReader report(json, where);
  TESSERA_CHECK(!report.has("error"), ErrorKind::kIo, "{}", report.string("error"));
  const std::string file = report.string("file");
  contents.files.push_back({file, report.at("bytes").as_unsigned(), report.at("xxh3").as_unsigned()});
  for (const auto& each : report.at("tensors").items()) add_tensor(contents, file, each);
  for (const auto& each : report.at("objects").items()) {
    const std::string name = each.string("name");
    TESSERA_CHECK(!contents.position.contains(name), ErrorKind::kShape, "{}: saved by two ranks", quote(name));
    contents.entry_of(name, planner_path(name));
    contents.metadata.storage_data.emplace_back(DcpIndex{.name = name, .offset = std::nullopt, .index = std::nullopt},
                                                place_in(file, each));
  }
}

}  // namespace tessera
