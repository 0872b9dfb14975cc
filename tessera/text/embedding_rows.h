// A check for token ids that have no row in a model's embedding.
//
//   check_embedding_rows(tokenizer, ids, config.vocab_size, "[score] a.jsonl line 1: 'text'");
//
// A tokenizer may have more tokens than the embedding has rows: the tokenizer of Gemma 3's text models has one token
// more, and tokenizer_config.json may add others. Such a model folder is usable as long as no text contains these
// tokens. Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tessera/text/tokenizer.h"

namespace tessera::text {

// `rows` is the number of rows of the embedding. Error kConfig when an id is `rows` or larger; the message names
// `where`, the first such token, and the remedy.
void check_embedding_rows(const Tokenizer& tokenizer, std::span<const TokenId> ids, int64_t rows,
                          std::string_view where);

}  // namespace tessera::text
