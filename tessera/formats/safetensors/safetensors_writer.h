// Writing safetensors files tensor by tensor: only one tensor needs to be in memory.
//
//   SafetensorsFolderWriter writer(dir, {{"a.weight", at::kFloat, {4, 8}}, ...}, {.max_shard_bytes = 5'000'000'000});
//   writer.write("a.weight", tensor);        // any order, each once
//   writer.finish();                         // the files appear now
//
// A file appears under its name only when it is complete and on disk; a writer that is dropped leaves nothing.
// Error kIo when the disk refuses, kShape when a tensor is not what was announced. One writer belongs to one thread.
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

// One file. The tensors lie in it by falling alignment, then by name, as the reference writer puts them.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<SafetensorsSpec> specs,
                    const SafetensorsMetadata& metadata = {{"format", "pt"}});
  // Copies to the CPU when needed; dtype and shape must be those announced.
  void write(std::string_view name, const at::Tensor& tensor);
  // Every announced tensor must have been written.
  void finish();

 private:
  struct Slot {
    SafetensorsEntry entry;
    bool written = false;
  };
  StagedFile file_;
  std::map<std::string, Slot, std::less<>> slots_;
};

struct SafetensorsFolderOptions {
  uint64_t max_shard_bytes = 5'000'000'000;
  SafetensorsMetadata metadata = {{"format", "pt"}};
};

// model.safetensors, or shards of at most max_shard_bytes (a larger tensor has a shard of its own) and their index.
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
