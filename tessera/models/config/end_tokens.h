// The tokens at which a model's texts end. A folder names them in several files, which need not agree: a base model
// that was taught chats often lists the end of a document alone.
//
//   options.stop_tokens = end_tokens(dir, config, tokenizer, chat);      // of generation
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

// "eos_token_id" of generation_config.json, where the file is there and has the key, else that of config.json. Error
// kFormat for text that is no JSON object, kConfig for ids outside the vocabulary.
std::vector<int64_t> listed_end_tokens(const std::filesystem::path& dir, const ModelConfig& config);

// Those, then the tokenizer's end of text and the token that ends a turn of the chat template; each once.
std::vector<int64_t> end_tokens(const std::filesystem::path& dir, const ModelConfig& config,
                                const text::Tokenizer& tokenizer, const std::optional<text::ChatTemplate>& chat);
// The same with the folder's own tokenizer and chat template. Without a tokenizer.json the listed ones alone.
std::vector<int64_t> end_tokens(const std::filesystem::path& dir, const ModelConfig& config);

// One warning that names the ends among these that neither generation_config.json (or config.json) nor
// tokenizer_config.json lists. Other programs go on behind them.
void warn_of_unlisted_ends(const std::filesystem::path& dir, const ModelConfig& config,
                           const text::Tokenizer& tokenizer, std::span<const int64_t> ends);

// The folder's chat template. Nothing where it has none, or one that cannot be read, which a warning tells: for work
// that goes on without a template.
std::optional<text::ChatTemplate> find_chat_template(const std::filesystem::path& dir);

// Makes generation_config.json of the folder list these tokens, so that transformers stops at them too. Other settings
// of the file stay; the file is left alone where it, or config.json without it, lists them already.
void write_end_tokens(const std::filesystem::path& dir, std::span<const int64_t> ends, const ModelConfig& config);

}  // namespace tessera
