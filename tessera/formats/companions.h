// What lies beside the weights in a Hugging Face folder and goes with them: tokenizer, chat template, settings of
// generation. config.json is not among them: a model writes its own.
#pragma once

#include <filesystem>

namespace tessera {

// Copies those that are there. Error kIo.
void copy_companions(const std::filesystem::path& from, const std::filesystem::path& to);
// The same, and config.json.
void copy_config_and_companions(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace tessera
