// manifest.json of a checkpoint: which box of which tensor lies in which file. docs/format/checkpoint.md.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

struct ManifestFile {
  std::string name;
  uint64_t size_bytes = 0;
  uint64_t xxh3 = 0;
};

struct ManifestPart {
  size_t file = 0;              // index into Manifest::files
  std::vector<int64_t> offset;  // of the box in the global tensor
  std::vector<int64_t> shape;
  std::vector<int64_t> at = {};  // of the box in the tensor of that file; empty: at its start
};

struct ManifestTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  std::vector<ManifestPart> parts;
};

struct Manifest {
  int64_t step = 0;
  int64_t number = 0;  // of the save in its folder: higher ones were published later
  int64_t world_size = 1;
  std::optional<double> validation_loss;
  std::vector<ManifestFile> files;
  std::map<std::string, ManifestTensor> tensors;
  nlohmann::json extra;

  std::string dump() const;
  // Error kFormat unless the parts of every tensor lie inside it, do not overlap and cover it.
  void check() const;
  // Error kFormat, naming `path`, for anything that is not such a manifest: names outside the folder, boxes outside
  // their tensor, parts that do not cover it.
  static Manifest parse(const std::string& text, const std::filesystem::path& path);
};

// XXH3 of a whole file, 64 bits.
uint64_t hash_file(const std::filesystem::path& path);
nlohmann::json part_to_json(const ManifestPart& part);
// nlohmann's exceptions for what is none.
ManifestPart part_from_json(const nlohmann::json& json);

}  // namespace tessera
