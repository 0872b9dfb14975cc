// What `tessera ckpt` does with files, apart from flags: list, convert, verify.
//
//   auto listing = list_tensors("smollm2");   // a .safetensors file, a folder of them, a GGUF file or a checkpoint
//   convert_checkpoint("model.gguf", "dir", {});   // GGUF to Hugging Face folder, or the other way round
//
// Errors as in formats/, models/gguf_convert.h and checkpoint/. Thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tessera::cli {

struct ListedTensor {
  std::string name;
  std::string dtype;  // as the format calls it: "BF16", "Q4_K"
  std::vector<int64_t> shape;
  uint64_t size_bytes = 0;
  std::string file;  // its name, without folder; "N files" for a tensor in several
};

// By name.
std::vector<ListedTensor> list_tensors(const std::filesystem::path& path);

struct ConvertOptions {
  std::string to;     // "hf", "gguf"; empty: hf from a GGUF file, gguf from a folder
  std::string dtype;  // empty: as GgufImportOptions and GgufExportOptions say
};
void convert_checkpoint(const std::filesystem::path& source, const std::filesystem::path& destination,
                        const ConvertOptions& options);

struct VerifiedFiles {
  size_t tensors = 0;
  uint64_t size_bytes = 0;
  std::map<std::string, size_t> unread;  // tensors of each type that cannot be decoded: their values were not checked
};
// Reads everything: structure, hashes where there are some, and that floating-point values are finite.
// Error kFormat names the first thing that is wrong.
VerifiedFiles verify_checkpoint(const std::filesystem::path& path);

}  // namespace tessera::cli
