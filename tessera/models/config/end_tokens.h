// The tokens at which a model's texts end. A folder lists them in several files, which may differ: a base model that
// was fine-tuned on chats often lists only the end of a document.
//
//   options.stop_tokens = end_tokens(dir, config, tokenizer, chat);      // for generation
//   write_end_tokens(exported, end_tokens(...), config);                 // for other programs
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "tessera/models/config/config.h"
#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera {

// Returns "eos_token_id" of generation_config.json when the file has this key, else eos_token_ids of `config`. Errors:
// kFormat for text that is not a JSON object, kConfig for ids outside the vocabulary.
std::vector<int64_t> listed_end_tokens(const std::filesystem::path& dir, const ModelConfig& config);

// Returns listed_end_tokens(), then the tokenizer's end-of-text token, then the token that ends a turn of the chat
// template. No token is returned twice.
std::vector<int64_t> end_tokens(const std::filesystem::path& dir, const ModelConfig& config,
                                const text::Tokenizer& tokenizer, const std::optional<text::ChatTemplate>& chat);
// Calls the end_tokens() above with the folder's own tokenizer and chat template. For a folder without tokenizer.json
// it returns listed_end_tokens().
std::vector<int64_t> end_tokens(const std::filesystem::path& dir, const ModelConfig& config);

// Logs one warning with the tokens of `ends` that neither generation_config.json (or config.json) nor
// tokenizer_config.json lists. Other programs continue generating after these tokens.
void warn_of_unlisted_ends(const std::filesystem::path& dir, const ModelConfig& config,
                           const text::Tokenizer& tokenizer, std::span<const int64_t> ends);

// Returns the folder's chat template, or nullopt when the folder has none. A template that cannot be read is a warning
// and gives nullopt too, for callers that can work without a template.
std::optional<text::ChatTemplate> find_chat_template(const std::filesystem::path& dir);

// Writes `ends` to generation_config.json of the folder, so that transformers stops at these tokens too. Other settings
// of the file are kept. Nothing is written when the file (or config.json, when there is no such file) already lists the
// same tokens.
void write_end_tokens(const std::filesystem::path& dir, std::span<const int64_t> ends, const ModelConfig& config);

}  // namespace tessera
