// manifest.json of a checkpoint: the data of a run that a PyTorch distributed checkpoint (DCP) cannot store.
// docs/format/checkpoint.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct ManifestFile {
  std::string name;
  uint64_t size_bytes = 0;
  uint64_t xxh3 = 0;
};

struct Manifest {
  int64_t step = 0;
  int64_t number = 0;  // counts the saves of the folder: a higher number was published later
  int64_t world_size = 1;
  std::optional<double> validation_loss;
  std::vector<ManifestFile> files;  // all files except the manifest itself
  nlohmann::json extra;

  std::string dump() const;
  // Parses the text of a manifest file. Error kFormat, which names `path`, for text that is not a manifest of this
  // version or that names files outside the checkpoint's folder.
  static Manifest parse(const std::string& text, const std::filesystem::path& path);
};

// 64-bit XXH3 hashes of bytes and of a whole file.
uint64_t hash_bytes(std::string_view bytes);
uint64_t hash_file(const std::filesystem::path& path);

}  // namespace tessera
