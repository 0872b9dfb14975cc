// Writing safetensors files tensor by tensor: only one tensor needs to be in memory.
//
//   SafetensorsFolderWriter writer(dir, {{"a.weight", at::kFloat, {4, 8}}, ...}, {.max_shard_bytes = 5'000'000'000});
//   writer.write("a.weight", tensor);        // any order, each once
//   writer.finish();                         // the files appear now
//
// A file appears under its name only when it is complete and on disk; a writer that is destroyed before finish() leaves
// no file. Errors: kIo when the disk refuses, kShape when a tensor does not have the announced dtype and shape. One
// writer belongs to one thread.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/files/staged.h"
#include "tessera/formats/safetensors/safetensors.h"

namespace at {
class Tensor;
}

namespace tessera {

struct SafetensorsSpec {
  std::string name;
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

// Writes one file. The tensors are stored by descending alignment of their dtype, then by name. The writer of the
// safetensors package uses this order too.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsSpec> specs,
                    const SafetensorsMetadata& metadata = {{"format", "pt"}});
  // Writes the tensor, which is copied to the CPU when needed. Its dtype and shape must be those of its
  // SafetensorsSpec.
  void write(std::string_view name, const at::Tensor& tensor);
  // Publishes the file. Every announced tensor must have been written.
  void finish();

 private:
  struct AnnouncedTensor {
    SafetensorsEntry entry;
    bool written = false;
  };
  StagedFile file_;
  std::map<std::string, AnnouncedTensor, std::less<>> announced_;
};

struct SafetensorsFolderOptions {
  uint64_t max_shard_bytes = 5'000'000'000;
  SafetensorsMetadata metadata = {{"format", "pt"}};
};

// Writes model.safetensors, or shards of at most max_shard_bytes and their index. A tensor larger than max_shard_bytes
// gets a shard of its own.
class SafetensorsFolderWriter {
 public:
  SafetensorsFolderWriter(std::filesystem::path dir, std::vector<SafetensorsSpec> specs,
                          SafetensorsFolderOptions options = {});
  void write(std::string_view name, const at::Tensor& tensor);
  // Publishes the shards, then the index.
  void finish();

 private:
  struct Shard {
    std::string file_name;
    std::vector<SafetensorsSpec> specs;
    std::unique_ptr<SafetensorsWriter> writer;
  };
  SafetensorsWriter& writer_of(Shard& shard) const;

  std::filesystem::path dir_;
  SafetensorsFolderOptions options_;
  std::vector<Shard> shards_;
  std::map<std::string, size_t, std::less<>> shard_of_;
  uint64_t total_bytes_ = 0;
};

}  // namespace tessera
