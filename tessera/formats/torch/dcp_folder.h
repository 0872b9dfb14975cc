// Reading a folder of torch.distributed.checkpoint (DCP).
//
//   const auto folder = DcpFolder::open("step-00000050");
//   folder->read("model.model.norm.weight", {0}, into);           // the box of into's shape at offset {0}
//   const at::Tensor whole = folder->tensor("model.model.norm.weight");
//   const double lr = folder->object("optim.param_groups.model.norm.weight.lr").as_float();
//
// open() checks `.metadata` (dcp_metadata.h), that no extension has transformed a record, and that every file is as
// long as the metadata requires. A folder saved with use_collectives=False has one `__RANK.metadata` for each rank;
// these are merged, and a chunk that several ranks saved is read from the lowest rank. read() reads a record on demand,
// and of its tensor only the pages that hold the box. Files are memory-mapped, so the ranks of one host share the pages
// read from the disk. Errors: kIo when a file cannot be read, kFormat when its contents are invalid. Thread-safe. No
// communication.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <c10/util/ArrayRef.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "tessera/formats/torch/dcp_metadata.h"
#include "tessera/formats/torch/pickle_value.h"
#include "tessera/formats/torch/torch_save.h"

namespace tessera {

class MappedFile;

class DcpFolder {
 public:
  static std::shared_ptr<const DcpFolder> open(const std::filesystem::path& path);
  // Whether the folder holds `.metadata` or `__0.metadata`.
  static bool is_dcp_folder(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const DcpMetadata& metadata() const { return metadata_; }
  // Returns the entry of the tensor with this name. Null when no entry has this name, or when the entry is not a tensor
  // but a pickled object.
  const DcpTensor* find_tensor(std::string_view name) const;
  bool contains(std::string_view name) const { return lookup_.find(name) != nullptr; }

  // Copies the box of into's shape that begins at `offset` into `into`, and converts it to into's dtype and device.
  // Error kShape for a box that is not inside the tensor.
  void read(std::string_view name, c10::IntArrayRef offset, const at::Tensor& into) const;
  // A copy of the whole tensor on the CPU.
  at::Tensor tensor(std::string_view name) const;
  PickleValue object(std::string_view name) const;
  // Opens every record and compares the CRC-32 of its pickle with the CRC-32 that the zip archive stores; with kValues
  // does the same for the values of a tensor. A record is a pickled object or one chunk of a tensor. `part` and `parts`
  // split the work: only records part, part + parts, part + 2 * parts, ... are opened. Some writers store no CRC-32:
  // returns the number of opened chunks whose values have none. Error kFormat when a CRC-32 differs.
  enum class Check { kPickles, kValues };
  size_t check_records(Check check_kind = Check::kValues, size_t part = 0, size_t parts = 1) const;

 private:
  struct MappedRecord {
    std::span<const std::byte> bytes;
    std::shared_ptr<const MappedFile> file;
    TorchRecord parsed;
    std::string where;
  };
  DcpFolder(std::filesystem::path path, DcpMetadata metadata);
  void check_files() const;
  MappedRecord record(const DcpStorageInfo& place) const;
  bool check_chunk(const std::string& name, const DcpTensor& tensor, const DcpChunk& chunk, Check check_kind) const;
  TorchTensorInfo chunk_info(const MappedRecord& record, const std::string& name, const DcpTensor& tensor,
                             const DcpChunk& chunk) const;
  at::Tensor chunk(const std::string& name, const DcpTensor& tensor, const DcpChunk& chunk) const;

  std::filesystem::path path_;
  DcpMetadata metadata_;
  DcpLookup lookup_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, std::shared_ptr<const MappedFile>> files_;  // by relative path
};

}  // namespace tessera
