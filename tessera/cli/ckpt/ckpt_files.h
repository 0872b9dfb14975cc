// What `tessera ckpt` does with files, apart from flags: list, verify, compare.
//
//   auto listing = list_tensors("smollm2");   // what TensorFiles opens, or a GGUF file
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

bool is_gguf(const std::filesystem::path& path);

struct ListedTensor {
  std::string name;
  std::string dtype;  // as the format calls it: "BF16", "Q4_K"
  std::vector<int64_t> shape;
  uint64_t size_bytes = 0;
  std::string file;  // its name, without folder; "N files" for a tensor in several
};

// By name.
std::vector<ListedTensor> list_tensors(const std::filesystem::path& path);

struct VerifiedFiles {
  size_t tensors = 0;
  uint64_t size_bytes = 0;
  // What values were compared with: a hash of each file that the run noted, checksums of the records; the format has
  // neither.
  enum class Compared { kNothing, kChecksums, kHashes } compared = Compared::kNothing;
  size_t without_checksum = 0;           // records that have none: changed values of theirs are not found
  int64_t step = 0;                      // of a run's checkpoint, which has hashes
  std::string without_model;             // why names and shapes were not compared with a model's; empty: they are those
  std::map<std::string, size_t> unread;  // tensors of each type that cannot be decoded: their values were not checked
};
// Reads everything: structure, hashes where there are some, names, shapes and tied values as the model wants them whose
// config.json is beside the weights, and that floating-point values are finite.
// Error kFormat names the first thing that is wrong.
VerifiedFiles verify_checkpoint(const std::filesystem::path& path);

struct TensorDifference {
  std::string name;
  std::string what;        // "only in the first", "F32 [2, 3] and BF16 [2, 3]"; empty: values differ
  double largest = 0;      // of |a - b|
  double relative = 0;     // that over the largest |a|
  uint64_t differing = 0;  // elements
};
struct ComparedFiles {
  size_t equal = 0;  // tensors that are bitwise equal
  std::vector<TensorDifference> different;
  bool weights_only = false;  // one of the two holds no more than a model's weights
};
// Tensor by tensor, by name; of a training checkpoint against plain weights the model's tensors alone.
ComparedFiles compare_checkpoints(const std::filesystem::path& a, const std::filesystem::path& b);

}  // namespace tessera::cli
