// Reads torch.save files: one object in a zip archive, with the storages of its tensors as raw entries.
//
//   auto file = TorchSaveFile::open("optimizer.pt");
//   for (size_t i = 0; i < file->root().dict_size(); ++i) {
//     if (const auto* info = file->find_tensor(file->root().value(i))) use(file->tensor(*info));
//   }
//
//   const auto record = TorchRecord::parse(bytes, "__0_0.distcp at byte 1577");   // one record of a DCP file
//   if (const auto* info = record.find_tensor(record.root())) read(info->begin(), info->nbytes());
//
// No code of a file is executed, and names outside the fixed list are rejected (unpickler.h). parse() checks
// that every tensor is inside its storage, and compares the CRC-32 of the pickle with the one in the zip
// directory, if the directory has one. It reads only the pickle and the zip directory. Error kFormat for an
// invalid file, compressed entries, the format of torch before 1.6, big-endian files, and sparse, quantised or
// lazily conjugated tensors. Thread-safe after parse(). No communication. docs/format/torch.md describes the
// format.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/formats/torch/pickle_value.h"

namespace at {
class Tensor;
}

namespace tessera {

class MappedFile;

// A strided tensor of a record; byte positions count from the record's first byte.
struct TorchTensorInfo {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // in elements, not negative
  int64_t storage_offset = 0;    // in elements
  bool requires_grad = false;
  bool is_parameter = false;
  uint64_t storage_begin = 0;  // byte range of the tensor's storage
  uint64_t storage_end = 0;
  uint32_t storage_crc = 0;  // CRC-32 of the storage when it was written; 0: not known
  std::string storage_name;  // name of the storage's entry in the archive

  int64_t numel() const;
  uint64_t item_bytes() const { return c10::elementSize(dtype); }
  uint64_t nbytes() const { return static_cast<uint64_t>(numel()) * item_bytes(); }
  // Byte position of the first element.
  uint64_t begin() const { return storage_begin + static_cast<uint64_t>(storage_offset) * item_bytes(); }
};

class TorchRecord {
 public:
  // `bytes` is exactly one record. It is used only during the call. Error messages contain `where`.
  static TorchRecord parse(std::span<const std::byte> bytes, const std::string& where);

  // Returns the saved object. A tensor inside it is a PickleValue for the call of a function of torch._utils that
  // rebuilds the tensor; find_tensor() returns the dtype, shape and position of such a tensor.
  const PickleValue& root() const { return root_; }
  // Returns the dtype, shape and position of the tensor `value`, an object in the tree of root(). Returns null when
  // `value` is not a tensor in this tree.
  const TorchTensorInfo* find_tensor(const PickleValue& value) const;
  size_t tensor_count() const { return tensors_.size(); }

 private:
  PickleValue root_;
  std::unordered_map<const void*, TorchTensorInfo> tensors_;
};

// Reads the whole storage of a tensor and compares its CRC-32 with info.storage_crc, the CRC-32 in the file. If
// info.storage_crc is 0, the file has none and nothing is compared. Error kFormat if the two differ.
void check_storage_crc(std::span<const std::byte> record, const TorchTensorInfo& info, const std::string& where);

// Returns the tensor that `info` describes in the bytes of `record`. The result is a READ-ONLY view of `record` where
// dtype and address allow a view; the view holds `keep`, which must keep the bytes of `record` alive. Otherwise (bool,
// unaligned) the result is a copy. View and copy have the saved strides. A tensor without elements is a new contiguous
// tensor.
at::Tensor record_tensor(std::span<const std::byte> record, const TorchTensorInfo& info,
                         std::shared_ptr<const void> keep);

// A torch.save file, memory-mapped.
class TorchSaveFile {
 public:
  // Maps the file into memory and parses it (TorchRecord::parse). Error kIo when the file cannot be read.
  static std::shared_ptr<const TorchSaveFile> open(const std::filesystem::path& path);

  const PickleValue& root() const { return record_.root(); }
  const TorchTensorInfo* find_tensor(const PickleValue& value) const { return record_.find_tensor(value); }
  // Returns the tensor as record_tensor() does, as a view of the memory-mapped file where possible. The tensor keeps
  // the map alive and is READ ONLY (a write into it ends the process). Tensors that share a storage in the file share
  // memory here.
  at::Tensor tensor(const TorchTensorInfo& info) const;
  // Reads the whole storage of the tensor and compares its CRC-32 with the one in the file, if the file has one
  // (check_storage_crc). Error kFormat if they differ.
  void check_crc(const TorchTensorInfo& info) const;

 private:
  TorchSaveFile() = default;
  std::filesystem::path path_;
  std::shared_ptr<const MappedFile> file_;
  TorchRecord record_;
};

}  // namespace tessera
