// The tensors of a Hugging Face folder: model.safetensors, or model.safetensors.index.json with its shards.
//
//   auto folder = SafetensorsFolder::open(dir);
//   for (const auto& [name, file] : folder.files()) ... file->tensor(name) ...
//   at::Tensor rows = folder.read_rows("model.embed_tokens.weight", 0, 1024);
//
// In a folder with both, the single file is read, as in transformers, with a warning that names both. A path to a
// .safetensors file opens as a folder of that one file. The index is untrusted: each shard must be inside the folder,
// after symbolic links too (the one exception is the Hub cache, snapshots/ID/* -> ../../blobs/*), and must hold the
// tensors that the index lists for it. Copies of this object share the maps. Thread-safe after open().
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tessera/formats/safetensors/safetensors.h"

namespace tessera {

class SafetensorsFolder {
 public:
  // Opens the folder `dir`, or one .safetensors file. Errors: kIo when neither model.safetensors nor the index exists
  // or a shard is missing, kFormat for an invalid index or shard.
  static SafetensorsFolder open(const std::filesystem::path& dir);

  // Every tensor name with the file that holds it.
  const std::map<std::string, std::shared_ptr<const SafetensorsFile>, std::less<>>& files() const { return files_; }
  bool contains(std::string_view name) const { return files_.find(name) != files_.end(); }
  // These functions call the functions of the same name of the SafetensorsFile that holds the tensor. Errors are those
  // of SafetensorsFile.
  const SafetensorsEntry& entry(std::string_view name) const { return file_of(name).entry(name); }
  at::Tensor tensor(std::string_view name) const;
  at::Tensor read_rows(std::string_view name, int64_t begin, int64_t end) const;
  at::Tensor read_slice(std::string_view name, std::span<const IndexRange> ranges) const;

 private:
  const SafetensorsFile& file_of(std::string_view name) const;
  std::filesystem::path dir_;
  std::map<std::string, std::shared_ptr<const SafetensorsFile>, std::less<>> files_;
};

}  // namespace tessera
