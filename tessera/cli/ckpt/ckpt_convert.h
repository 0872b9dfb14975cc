// `tessera ckpt convert`: from what holds a model's tensors to another format.
//
//   convert_checkpoint("model.gguf", "dir", {});                               // GGUF to Hugging Face folder
//   convert_checkpoint("smollm2", "dir", {.to = "hf", .adapter = "runs/a/model"});   // its adapters merged
//   convert_checkpoint("runs/a/checkpoints/step-00000050", "dir", {.to = "hf", .config = "smollm2"});
//
// A folder that holds a model and its adapter goes with options.adapter alone: Error kConfig (models/files/weights.h).
// Else errors as in formats/, models/gguf/gguf_convert.h and checkpoint/write_dcp.h. The destination must not exist and
// appears when it is complete. Thread-safe.
#pragma once

#include <filesystem>
#include <string>

namespace tessera::cli {

struct ConvertOptions {
  std::string to;                      // "hf", "gguf", "dcp", "torch"; empty: hf, but gguf from a Hugging Face folder
  std::string dtype;                   // empty: as GgufImportOptions and GgufExportOptions say, else the tensors' own
  std::filesystem::path config = {};   // a folder whose config.json and tokenizer go with the weights; empty: the
                                       // source, of a run's checkpoint what it started from
  std::filesystem::path adapter = {};  // of PEFT's, added to the weights of a Hugging Face folder
};
// Returns what the user should know of the result, a line or nothing.
std::string convert_checkpoint(const std::filesystem::path& source, const std::filesystem::path& destination,
                               const ConvertOptions& options);

}  // namespace tessera::cli
