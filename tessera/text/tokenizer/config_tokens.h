// Reads the added tokens of tokenizer_config.json.
#pragma once

#include <vector>

#include "tessera/text/tokenizer/added_tokens.h"

namespace tessera::text {

// `config` is tokenizer_config.json, `file` is tokenizer.json. The tokens are those that transformers 5 adds, in its
// order:
//   1. "added_tokens_decoder", by id;
//   2. "bos_token" to "mask_token" (special_token_keys);
//   3. every other key that ends in "_token";
//   4. the members of the object "extra_special_tokens", or of "model_specific_special_tokens" if 3 and
//      "extra_special_tokens" gave no token;
//   5. the list "extra_special_tokens", or "additional_special_tokens" if that list is absent or empty.
// Tokens from 2 to 5 are special. They have the flags that "added_tokens_decoder", or without this key tokenizer.json,
// gives for the same text. Ids are not set: a token that is not in tokenizer.json gets the next free id, even if
// "added_tokens_decoder" lists it under another id. Error kFormat for values of the wrong type.
std::vector<AddedToken> read_config_tokens(const JsonReader& config, const JsonReader& file);

}  // namespace tessera::text
