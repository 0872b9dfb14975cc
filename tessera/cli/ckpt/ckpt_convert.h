// `tessera ckpt convert`: converts a model or checkpoint to another format.
//
//   convert_checkpoint("model.gguf", "dir", {});                               // GGUF to Hugging Face folder
//   convert_checkpoint("smollm2", "dir", {.to = "hf", .adapter = "runs/a/model"});   // merges adapters
//   convert_checkpoint("runs/a/checkpoints/step-00000050", "dir", {.to = "hf", .config = "smollm2"});
//
// The destination must not exist; it appears when it is complete. Error kConfig for a folder that holds a model
// together with an adapter, unless options.adapter is set (models/files/weights.h). Other errors as in formats/,
// models/gguf/gguf_convert.h and checkpoint/write_dcp.h. Thread-safe.
#pragma once

#include <filesystem>
#include <string>

namespace tessera::cli {

struct ConvertOptions {
  std::string to;     // "hf", "gguf", "dcp", "torch"; empty: hf, but gguf for a Hugging Face folder
  std::string dtype;  // empty: the defaults of GgufImportOptions and GgufExportOptions, else the dtypes of the source
  // A folder whose config.json and tokenizer are copied to the result. Empty: the source, or for a checkpoint of a run
  // the model that the run started from.
  std::filesystem::path config = {};
  std::filesystem::path adapter = {};  // folder of a PEFT adapter that is merged into a Hugging Face model
};
// Returns a remark on the result for the user: one line, or empty.
std::string convert_checkpoint(const std::filesystem::path& source, const std::filesystem::path& destination,
                               const ConvertOptions& options);

}  // namespace tessera::cli
