// Converts GGUF files (llama.cpp) to Hugging Face folders and back, for the families that have a GgufMap (family.h).
//
//   gguf_to_folder("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2");         // transformers and from_pretrained load it
//   folder_to_gguf("smollm2-tuned", "tuned.gguf", {.type = GgmlType::kQ8_0});   // llama.cpp loads it
//
// Weights, configuration, tokenizer and chat template are converted. llama.cpp stores the rows of q and k in another
// order and adds 1 to some norm weights; the conversions undo or apply both changes. The destination appears only when
// it is complete. Only one tensor at a time is in memory.
// Errors: kFormat for input that is not valid, kConfig for a valid model that this version does not convert, kIo when
// the destination exists or a write fails. Thread-safe.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <optional>

#include "tessera/formats/gguf/gguf_quants.h"

namespace tessera {

struct GgufImportOptions {
  // float32, bfloat16 or float16. Unset: float32 when a tensor is quantised, else the dtype of the matrices.
  std::optional<c10::ScalarType> dtype;
  uint64_t max_shard_bytes = 5'000'000'000;
};

struct GgufExportOptions {
  // F32, F16, BF16 or Q8_0, for the matrices; vectors are always F32. Unset: the type of the folder's matrices, or F32
  // when they have several dtypes or float64.
  std::optional<GgmlType> type;
};

// Converts the file `gguf` to the Hugging Face folder `dir`, which must not exist or must be empty. The folder gets
// config.json, generation_config.json, model.safetensors (or shards and index), tokenizer.json, tokenizer_config.json
// and special_tokens_map.json.
void gguf_to_folder(const std::filesystem::path& gguf, const std::filesystem::path& dir,
                    const GgufImportOptions& options = {});

// Like gguf_to_folder(), but does not convert the weights: the folder gets a symbolic link kLinkedGguf to the GGUF
// file, from which load_pretrained() reads the weights.
inline constexpr const char* kLinkedGguf = "model.gguf";
void gguf_to_linked_folder(const std::filesystem::path& gguf, const std::filesystem::path& dir);

// Converts the model in the folder `dir` to the GGUF file `gguf`, which must not exist.
void folder_to_gguf(const std::filesystem::path& dir, const std::filesystem::path& gguf,
                    const GgufExportOptions& options = {});

}  // namespace tessera
