// The tokens of a plain text that is not a chat: a document, or the prompt of a completion.
//
//   const auto document = encode_document(tokenizer, "<s>In the beginning");  // one <s>, not two
//
// Thread-safe.
#pragma once

#include <string_view>
#include <vector>

#include "tessera/text/tokenizer.h"

namespace tessera::text {

struct Document {
  std::vector<TokenId> ids;
  bool begins_with_bos = false;  // the text itself begins with the BOS token that the tokenizer adds in front
};

// Encodes like Tokenizer::encode, with one difference: when the text already begins with the special token that the
// post-processor adds in front (BOS), the result has this token once.
Document encode_document(const Tokenizer& tokenizer, std::string_view text);

}  // namespace tessera::text
