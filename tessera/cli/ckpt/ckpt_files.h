// The work of `tessera ckpt` without its flags: list, verify and compare files.
//
//   auto listing = list_tensors("smollm2");   // any path that TensorFiles opens, or a GGUF file
//   auto verified = verify_checkpoint("runs/a/checkpoints/step-00000050");
//
// Errors as in formats/ and checkpoint/. Thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tessera::cli {

// Whether `path` is a file that begins with the magic number of GGUF. Error kIo if it does not exist.
bool is_gguf(const std::filesystem::path& path);

struct ListedTensor {
  std::string name;
  std::string dtype;  // name in the file's format: "BF16", "Q4_K"
  std::vector<int64_t> shape;
  uint64_t size_bytes = 0;
  std::string file;  // file name without folder; "N files" for a tensor that is stored in several
};

// All tensors, ordered by name.
std::vector<ListedTensor> list_tensors(const std::filesystem::path& path);

struct VerifiedFiles {
  size_t tensors = 0;
  uint64_t size_bytes = 0;
  // How values were verified: kHashes with a hash of each file from the manifest of a run; kChecksums with a checksum
  // of each record; kNothing if the format has neither.
  enum class Compared { kNothing, kChecksums, kHashes } compared = Compared::kNothing;
  size_t without_checksum = 0;  // records without a checksum; a changed value in them is not found
  int64_t step = 0;             // step of a run's checkpoint (kHashes)
  std::string without_model;    // why names and shapes were not compared with those of a model; empty: they are right
  std::map<std::string, size_t> unread;  // type -> number of tensors of types that cannot be decoded and checked
};
// Reads all of a checkpoint or model and checks its structure, its hashes or checksums if it has any, and that
// floating-point values are finite. If config.json is in the same folder, also checks names, shapes and tied values
// against its model. Error kFormat names the first fault.
VerifiedFiles verify_checkpoint(const std::filesystem::path& path);

struct TensorDifference {
  std::string name;
  std::string description;  // "only in the first", "F32 [2, 3] and BF16 [2, 3]"; empty: only values differ
  double largest = 0;       // max |a - b|
  double relative = 0;      // max |a - b| / max |a|
  uint64_t differing = 0;   // number of elements that differ
};
struct ComparedFiles {
  size_t equal = 0;  // tensors that are bitwise equal
  std::vector<TensorDifference> different;
  bool weights_only = false;  // only weights were compared, because one of the two has no other tensors
};
// Compares the tensors of two paths by name. If one is a training checkpoint and the other has weights only, compares
// the weights. Error kConfig for a GGUF file.
ComparedFiles compare_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace tessera::cli
