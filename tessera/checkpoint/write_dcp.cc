#include "tessera/checkpoint/write_dcp.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/staged.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/record_file.h"
#include "tessera/checkpoint/share.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/companions.h"
#include "tessera/formats/torch/dcp_folder.h"

namespace tessera {
namespace {

// The files of all ranks and what has been written into them.
class DcpInProgress {
 public:
  DcpInProgress(const std::filesystem::path& dir, int ranks) : folder_(dir) {
    TESSERA_CHECK(ranks > 0 && ranks <= 65536, ErrorKind::kConfig, "[checkpoint.write] {} ranks, wanted 1 to 65536",
                  ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      files_.push_back(std::make_unique<RecordFile>(folder_.path() / fmt::format("__{}_0.distcp", rank)));
    }
  }

  const std::filesystem::path& path() const { return folder_.path(); }

  // `read` fills the box of into's shape from an offset on.
  void add_tensor(const std::string& name, const DcpPath& path, const StoredTensor& stored,
                  const std::function<void(c10::IntArrayRef offset, const at::Tensor& into)>& read) {
    DcpTensor tensor;
    tensor.dtype = stored.dtype;
    tensor.size = stored.shape;
    const auto ranks = static_cast<int64_t>(files_.size());
    const bool cut = !stored.shape.empty() && stored.size_bytes() > 0;
    for (int64_t rank = 0; rank < (cut ? ranks : 1); ++rank) {
      std::vector<int64_t> offset(stored.shape.size(), 0), shape = stored.shape;
      if (cut) {
        const auto range = local_range(stored.shape[0], ranks, rank);
        if (range.size == 0) break;
        offset[0] = range.offset, shape[0] = range.size;
      }
      const auto box = at::empty(shape, at::TensorOptions(stored.dtype));
      read(offset, box);
      auto& file = *files_[static_cast<size_t>(cut ? rank : 0)];
      const auto place = file.append([&](const ByteSink& sink) { write_tensor_record(box, sink); });
      metadata().storage_data.emplace_back(
          DcpIndex{.name = name, .offset = offset, .index = static_cast<int64_t>(tensor.chunks.size())},
          storage(cut ? rank : 0, place));
      tensor.chunks.push_back({offset, shape});
    }
    metadata().planner_data->emplace_back(name, path);
    metadata().entries.push_back({name, std::move(tensor)});
  }

  void add_object(const std::string& name, const DcpPath& path, const PickleValue& value) {
    const auto place = files_.front()->append([&](const ByteSink& sink) { write_object_record(value, sink); });
    metadata().storage_data.emplace_back(DcpIndex{.name = name, .offset = std::nullopt, .index = std::nullopt},
                                         storage(0, place));
    metadata().planner_data->emplace_back(name, path);
    metadata().entries.push_back({name, std::nullopt});
  }

  // A manifest is written when there is one to go on.
  void publish(std::optional<Manifest> manifest) {
    for (auto& file : files_) contents_.files.push_back(file->publish());
    metadata().check(folder_.path().string());
    const auto bytes = metadata().dump();
    publish_file(folder_.path() / ".metadata", bytes);
    if (manifest) {
      manifest->files = contents_.files;
      manifest->files.push_back({".metadata", bytes.size(), hash_bytes(bytes)});
      manifest->world_size = static_cast<int64_t>(files_.size());
      publish_file(folder_.path() / "manifest.json", manifest->dump());
    }
    folder_.publish();
  }

 private:
  DcpMetadata& metadata() { return contents_.metadata; }
  static DcpStorageInfo storage(int64_t rank, const RecordPlace& place) {
    return {.relative_path = fmt::format("__{}_0.distcp", rank), .offset = place.offset, .length = place.length};
  }

  StagedFolder folder_;
  std::vector<std::unique_ptr<RecordFile>> files_;
  CheckpointContents contents_;
};

}  // namespace

void write_dcp(const TensorFiles& from, const std::filesystem::path& dir, const WriteDcpOptions& options) {
  DcpInProgress out(dir, options.ranks);
  for (const auto& [name, stored] : from.tensors()) {
    out.add_tensor(
        options.prefix + name, planner_path(options.prefix + name), stored,
        [&, &name = name](c10::IntArrayRef offset, const at::Tensor& into) { from.read(name, offset, into); });
  }
  if (!options.companions.empty()) copy_companions(options.companions, out.path());
  out.publish(std::nullopt);
}

void reshard(const std::filesystem::path& from, const std::filesystem::path& dir, int ranks) {
  std::optional<Manifest> manifest;
  if (const auto path = from / "manifest.json"; std::filesystem::exists(path)) {
    manifest = Manifest::parse(read_file(path), path);
  }
  const auto source = DcpFolder::open(from);
  const DcpLookup lookup(source->metadata());
  DcpInProgress out(dir, ranks);
  for (const auto& entry : source->metadata().entries) {
    const auto* path = lookup.find_path(entry.name);
    const auto whole_path = path ? *path : DcpPath{entry.name};
    if (!entry.tensor) {
      out.add_object(entry.name, whole_path, source->object(entry.name));
      continue;
    }
    out.add_tensor(entry.name, whole_path, {entry.tensor->dtype, entry.tensor->size, {}},
                   [&](c10::IntArrayRef offset, const at::Tensor& into) { source->read(entry.name, offset, into); });
  }
  out.publish(std::move(manifest));
}

}  // namespace tessera
