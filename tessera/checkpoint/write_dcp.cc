#include "tessera/checkpoint/write_dcp.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <functional>
#include <optional>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/rank_snapshot.h"
#include "tessera/checkpoint/record_file.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/companions.h"
#include "tessera/formats/torch/dcp_folder.h"

namespace tessera {
namespace {

// Writes a DCP folder. The file of each rank is written after the file of the rank before it, so only one file is open
// at a time.
class DcpFolderWriter {
 public:
  using ReadBox = std::function<void(c10::IntArrayRef offset, const at::Tensor& into)>;

  DcpFolderWriter(const std::filesystem::path& dir, int ranks) : folder_(dir), ranks_(ranks) {
    TESSERA_CHECK(ranks > 0 && ranks <= 65536, ErrorKind::kConfig, "[checkpoint.write] {} ranks, wanted 1 to 65536",
                  ranks);
  }

  const std::filesystem::path& path() const { return folder_.path(); }

  // `read`(offset, into) fills `into` with the values of the tensor's box that begins at `offset` and has the shape of
  // `into`.
  void add_tensor(const std::string& name, const DcpPath& path, const StoredTensor& stored, ReadBox read) {
    contents_.entry_of(name, path).tensor = DcpTensor{.dtype = stored.dtype, .size = stored.shape};
    readers_.push_back(std::move(read));
  }

  void add_object(const std::string& name, const DcpPath& path, const PickleValue& value) {
    contents_.entry_of(name, path);
    objects_.emplace_back(name, value);
    readers_.emplace_back();
  }

  // Writes all files of the checkpoint and publishes its folder. `of_source` is the manifest of the checkpoint from
  // which the tensors come: a copy of it with the new files and the new number of ranks becomes manifest.json. Null: no
  // manifest is written.
  void publish(const Manifest* of_source) {
    for (int rank = 0; rank < ranks_; ++rank) write_rank(rank);
    contents_.publish_metadata(folder_.path());
    if (of_source != nullptr) {
      Manifest manifest = *of_source;
      manifest.files = contents_.files;
      manifest.world_size = ranks_;
      publish_file(folder_.path() / "manifest.json", manifest.dump());
    }
    folder_.publish();
  }

 private:
  void write_rank(int rank) {
    RecordFile file(folder_.path() / fmt::format("__{}_0.distcp", rank));
    for (size_t i = 0; i < readers_.size(); ++i) {
      if (readers_[i]) write_chunk(file, rank, contents_.metadata.entries[i], readers_[i]);
    }
    for (const auto& object : objects_) {
      if (rank > 0) break;
      contents_.metadata.storage_data.emplace_back(
          DcpIndex{.name = object.first, .offset = std::nullopt, .index = std::nullopt},
          file.append([&](const ByteSink& sink) { write_object_record(object.second, sink); }));
    }
    contents_.files.push_back(file.publish());
  }

  // Writes chunk `rank` of dim 0, split as by torch.chunk. A 0-d or empty tensor is written by rank 0.
  void write_chunk(RecordFile& file, int rank, DcpEntry& entry, const ReadBox& read) {
    const auto& tensor = *entry.tensor;
    std::vector<int64_t> offset(tensor.size.size(), 0), shape = tensor.size;
    if (shape.empty() || c10::multiply_integers(shape) == 0) {
      if (rank > 0) return;
    } else {
      const auto range = local_range(shape[0], ranks_, rank);
      if (range.size == 0) return;
      offset[0] = range.offset;
      shape[0] = range.size;
    }
    const auto box = at::empty(shape, at::TensorOptions(tensor.dtype));
    read(offset, box);
    contents_.add_chunk(entry, {offset, shape},
                        file.append([&](const ByteSink& sink) { write_tensor_record(box, sink); }));
  }

  StagedFolder folder_;
  int ranks_;
  std::vector<ReadBox> readers_;  // by entry of the metadata; empty for an object
  std::vector<std::pair<std::string, PickleValue>> objects_;
  CheckpointContents contents_;
};

}  // namespace

void write_dcp(const TensorFiles& from, const std::filesystem::path& dir, const WriteDcpOptions& options) {
  DcpFolderWriter out(dir, options.ranks);
  for (const auto& [name, stored] : from.tensors()) {
    out.add_tensor(options.prefix + name, planner_path(options.prefix + name), stored,
                   [&, &name = name](c10::IntArrayRef offset, const at::Tensor& into) {
                     from.read(name, offset, into);
                     if (options.check) options.check(name, into);
                   });
  }
  if (!options.companions.empty()) copy_config_and_companions(options.companions, out.path());
  out.publish(nullptr);
}

void reshard(const std::filesystem::path& from, const std::filesystem::path& dir, int ranks) {
  const auto checkpoint = Checkpoint::open(from);
  checkpoint.verify();  // throws for damaged data, which must not get new hashes
  const auto& source = checkpoint.contents();
  const DcpLookup lookup(source.metadata());
  DcpFolderWriter out(dir, ranks);
  for (const auto& entry : source.metadata().entries) {
    const auto* path = lookup.find_path(entry.name);
    const auto whole_path = path ? *path : DcpPath{entry.name};
    if (!entry.tensor) {
      out.add_object(entry.name, whole_path, source.object(entry.name));
      continue;
    }
    out.add_tensor(entry.name, whole_path, {entry.tensor->dtype, entry.tensor->size, {}},
                   [&](c10::IntArrayRef offset, const at::Tensor& into) { source.read(entry.name, offset, into); });
  }
  if (!checkpoint.manifest()) copy_config_and_companions(from, out.path());
  out.publish(checkpoint.manifest());
}

}  // namespace tessera
