// Tokens for which a model's embedding has no row.
//
//   check_token_rows(tokenizer, ids, config.vocab_size, "[score] a.jsonl line 1: 'text'");
//
// A tokenizer may have more tokens than the model has rows: Gemma 3's text models have one, and tokenizer_config.json
// may add others. Such a folder is usable as long as no text holds these tokens. Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tessera/text/tokenizer.h"

namespace tessera::text {

// Error kConfig for the first id of at least `rows`: it names `where`, the token, and what to do.
void check_token_rows(const Tokenizer& tokenizer, std::span<const TokenId> ids, int64_t rows, std::string_view where);

}  // namespace tessera::text
