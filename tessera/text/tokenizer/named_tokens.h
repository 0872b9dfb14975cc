// Added tokens that tokenizer_config.json names beside those of tokenizer.json.
#pragma once

#include <vector>

#include "tessera/text/tokenizer/added_tokens.h"

namespace tessera::text {

// As transformers 5 adds them, in its order: those of "added_tokens_decoder" by their ids, then "bos_token" to
// "mask_token" (special_token_keys), every other key of that ending, the members of an object "extra_special_tokens"
// (or without any of these, of "model_specific_special_tokens"), then the list "extra_special_tokens" or
// "additional_special_tokens". All but the first are special, with the flags that the decoder or else tokenizer.json
// (`file`) has for their text. Ids are not set: a token that tokenizer.json lacks gets the next free id, whatever id
// the decoder lists it under. Error kFormat for values of the wrong type.
std::vector<AddedToken> named_tokens(const JsonReader& config, const JsonReader& file);

}  // namespace tessera::text
