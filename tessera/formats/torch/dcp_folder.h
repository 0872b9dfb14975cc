// Reading a folder of torch.distributed.checkpoint (DCP).
//
//   const auto folder = DcpFolder::open("step-00000050");
//   folder->read("model.model.norm.weight", {0}, into);           // a box of into's shape, from there on
//   const at::Tensor whole = folder->tensor("model.model.norm.weight");
//   const double lr = folder->object("optim.param_groups.model.norm.weight.lr").as_float();
//
// open() checks `.metadata` (dcp_metadata.h), that no record was transformed by an extension, and that every file it
// names has the bytes that it speaks of. A folder saved with use_collectives=False, which has a `__RANK.metadata` for
// each rank instead, is read as one: chunks that several ranks saved are taken from the lowest. A record is read where
// it is wanted, and of a tensor only the pages that hold the box. Files are mapped, so that ranks of one host share
// what was read from the disk. Error kIo when something cannot be read, kFormat when it is not what it should be.
// Thread-safe. No communication.
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
  // Whether it holds `.metadata` or `__0.metadata`.
  static bool is_one(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const DcpMetadata& metadata() const { return metadata_; }
  // Null when there is no such name, or when it is an object's.
  const DcpTensor* find_tensor(std::string_view name) const;
  bool contains(std::string_view name) const { return lookup_.find(name) != nullptr; }

  // Copies the box that begins at `offset` into `into`, whose shape it has, and converts it to its dtype and device.
  // Error kShape for a box that is not inside the tensor.
  void read(std::string_view name, c10::IntArrayRef offset, const at::Tensor& into) const;
  // All of it, on the CPU.
  at::Tensor tensor(std::string_view name) const;
  PickleValue object(std::string_view name) const;
  // Reads every record, its tensor's values too with kValues, and compares its checksums. `part` of `parts`: only each
  // parts-th record from there on. Some writers compute none: returns how many tensors' values had none.
  enum class Check { kPickles, kValues };
  size_t check_records(Check what = Check::kValues, size_t part = 0, size_t parts = 1) const;

 private:
  struct Record {
    std::span<const std::byte> bytes;
    std::shared_ptr<const MappedFile> file;
    TorchRecord parsed;
    std::string where;
  };
  DcpFolder(std::filesystem::path path, DcpMetadata metadata);
  void check_files() const;
  Record record(const DcpStorageInfo& place) const;
  bool check_chunk(const std::string& name, const DcpTensor& tensor, const DcpChunk& chunk, Check what) const;
  TorchTensorInfo chunk_info(const Record& record, const std::string& name, const DcpTensor& tensor,
                             const DcpChunk& chunk) const;
  at::Tensor chunk(const std::string& name, const DcpTensor& tensor, const DcpChunk& chunk) const;

  std::filesystem::path path_;
  DcpMetadata metadata_;
  DcpLookup lookup_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, std::shared_ptr<const MappedFile>> files_;  // by relative path
};

}  // namespace tessera
