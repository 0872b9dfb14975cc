// What lies beside the weights in a Hugging Face folder and goes with them: tokenizer, chat template, settings of
// generation. config.json is not among them: a model writes its own.
#pragma once

#include <filesystem>
#include <span>

namespace tessera {

std::span<const char* const> companion_names();
// Copies those that are there, and config.json. Error kIo.
void copy_companions(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace tessera
