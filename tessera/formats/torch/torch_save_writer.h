// Writes files for torch.load, in one pass and with one storage in memory at a time.
//
//   StagedFile file(path);
//   uint64_t end = 0;
//   const ByteSink sink = [&](std::span<const std::byte> bytes) { file.write_at(end, bytes); end += bytes.size(); };
//   const uint64_t length = write_tensor_record(tensor, sink);              // DCP records, one after the other
//   const uint64_t more = write_object_record(PickleValue(0.1), sink);
//
//   TorchSaveWriter writer;                                                  // a state dict in one file
//   const auto weight = writer.add(tensor);
//   writer.write(PickleValue::dict({{"model", PickleValue::dict({{"weight", weight}})}}), sink);
//
// Tensors are detached, are copied to the CPU when they are written, and are stored row-major in storages of exactly
// their size. Contiguous tensors that each cover one whole storage share it in the file, as in torch.save.
// torch.load(weights_only=True) reads the result. Exceptions of the sink are passed on. Error kFormat for a dtype or
// layout that a file cannot hold. No communication.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <unordered_map>
#include <vector>

#include "tessera/formats/torch/pickle_value.h"
#include "tessera/formats/torch/zip_writer.h"

namespace at {
class Tensor;
}

namespace tessera {

struct TensorRecordOptions {
  bool requires_grad = false;
};

// Writes one record that holds the tensor to `sink`. Returns the length of the record in bytes.
uint64_t write_tensor_record(const at::Tensor& tensor, const ByteSink& sink, const TensorRecordOptions& options = {});
// Writes one record that holds an object without tensors to `sink`. Returns the length of the record in bytes.
uint64_t write_object_record(const PickleValue& object, const ByteSink& sink);
// Return the lengths in bytes that write_tensor_record() and write_object_record() would return.
uint64_t tensor_record_bytes(c10::ScalarType dtype, std::span<const int64_t> sizes,
                             const TensorRecordOptions& options = {});
uint64_t object_record_bytes(const PickleValue& object);

// Writes one object with any number of tensors in it. A writer is used by one thread and for one call of write().
class TorchSaveWriter {
 public:
  // Returns a placeholder of the tensor, which may occur any number of times in `root`, the argument of write(). The
  // writer holds the tensor's storage until the writer is destroyed. The tensor must not change until write() has
  // returned.
  PickleValue add(const at::Tensor& tensor, const TensorRecordOptions& options = {});
  // Writes the file, with `root` as the object that torch.load returns, to `sink`. Returns the length of the file in
  // bytes.
  uint64_t write(const PickleValue& root, const ByteSink& sink);

 private:
  std::vector<at::TensorBase> storages_;
  std::unordered_map<const void*, size_t> index_by_storage_;  // storages written unchanged: address to index
};

// Calls write() for a file that appears under `path` only when it is complete. Error kIo.
void write_torch_save(const std::filesystem::path& path, TorchSaveWriter& writer, const PickleValue& root);

}  // namespace tessera
