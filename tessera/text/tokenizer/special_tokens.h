// Reads the special tokens of a Hugging Face folder: bos_token, eos_token, unk_token, ...
//
//   const Json map = read_special_tokens_map(folder);
//   const Json tokens = special_tokens_of(map, tokenizer_config);  // {"bos_token": "<s>", "eos_token": "</s>"}
//
// The functions read files and have no other side effects. Thread-safe.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

namespace tessera::text {

// "bos_token" to "mask_token", in the order of SPECIAL_TOKENS_ATTRIBUTES of transformers. In this order transformers
// adds the tokens that are not in tokenizer.json.
std::span<const char* const> special_token_keys();

// The JSON object in the file `path`, or an empty object when the file does not exist. Error kFormat when the file is
// not a JSON object; the message begins with `where`.
nlohmann::ordered_json read_optional_json_object(const std::filesystem::path& path, const std::string& where,
                                                 size_t max_keys = JsonLimits{}.max_keys);
// The content of special_tokens_map.json in `folder`, or an empty object.
nlohmann::ordered_json read_special_tokens_map(const std::filesystem::path& folder);

// Returns an object from key ("bos_token", ...) to the token's text. `config` is tokenizer_config.json, or an empty
// object; `map` is special_tokens_map.json. As in transformers, a token in `map` replaces the token in `config` when
// `config` has no added_tokens_decoder; otherwise `map` only adds tokens whose key is not in `config`.
nlohmann::ordered_json special_tokens_of(const nlohmann::ordered_json& map, const nlohmann::ordered_json& config);

}  // namespace tessera::text
