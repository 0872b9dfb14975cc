// The tokens of a text that stands for itself: a document, or the prompt of a completion.
//
//   const auto document = encode_document(tokenizer, "<s>In the beginning");  // one <s>, whoever writes it
//
// Thread-safe.
#pragma once

#include <string_view>
#include <vector>

#include "tessera/text/tokenizer.h"

namespace tessera::text {

struct Document {
  std::vector<TokenId> ids;
  bool spells_start = false;  // the text has itself the token that the tokenizer puts in front
};

// As Tokenizer::encode, but a text that begins with the special token that the post-processor adds (BOS) does not get a
// second one.
Document encode_document(const Tokenizer& tokenizer, std::string_view text);

}  // namespace tessera::text
