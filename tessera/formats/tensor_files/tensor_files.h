// The tensors of a checkpoint in any supported format: safetensors, torch.distributed.checkpoint (DCP), torch.save.
//
//   const auto files = TensorFiles::open(path);
//   for (const auto& [name, stored] : files->tensors()) ...
//   files->read("model.norm.weight", {0}, into);              // the box of into's shape at offset {0}
//
// Paths that open() accepts:
//   a .safetensors file, a folder with model.safetensors, or with its shards and index     kSafetensors
//   a folder of shard-*.safetensors, as DCP's HuggingFaceStorageWriter leaves them         kSafetensorsShards
//   a folder with .metadata, or __0.metadata                                               kDcp
//   a file of torch.save; a folder with pytorch_model.bin, or with its shards and index    kTorchSave
// A tensor's name is its path in the nested state dict, joined with dots. Errors: kIo for a file that cannot be read,
// kFormat for an invalid file. Thread-safe. No communication.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct StoredTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  std::string file;  // file name without folder; "3 files" for a tensor in several files
  uint64_t size_bytes() const;
};

struct TensorFilesOptions {
  // If true, only the tensors of the model are read from a training checkpoint, under their names in the model. These
  // are the tensors in the dict "model" (DCP, torch.save), "state_dict" or "model_state_dict" (torch.save), where such
  // a dict exists.
  bool weights_only = false;
};

class TensorFiles {
 public:
  enum class Format { kSafetensors, kSafetensorsShards, kDcp, kTorchSave };

  static std::shared_ptr<const TensorFiles> open(const std::filesystem::path& path,
                                                 const TensorFilesOptions& options = {});
  // Whether open() would find tensors at `path`. A folder without tensors is not an error.
  static bool has_tensors(const std::filesystem::path& path);
  virtual ~TensorFiles() = default;

  Format format() const { return format_; }
  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, StoredTensor, std::less<>>& tensors() const { return tensors_; }
  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }
  // Returns the entry of the tensor `name` in tensors(). Error kFormat when no tensor has this name.
  const StoredTensor& at(std::string_view name) const;

  // Reads a box of the tensor `name` into `into`: the box begins at index `offset` and has into's shape. The values are
  // converted to into's dtype and device. Error kShape for a box that is not inside the tensor.
  void read(std::string_view name, c10::IntArrayRef offset, const at::Tensor& into) const;
  // A copy of the whole tensor on the CPU.
  at::Tensor tensor(std::string_view name) const;

 protected:
  TensorFiles(Format format, std::filesystem::path path) : format_(format), path_(std::move(path)) {}
  virtual void read_box(const std::string& name, c10::IntArrayRef offset, const at::Tensor& into) const = 0;
  std::map<std::string, StoredTensor, std::less<>> tensors_;

 private:
  Format format_;
  std::filesystem::path path_;
};

const char* to_string(TensorFiles::Format format);

}  // namespace tessera
