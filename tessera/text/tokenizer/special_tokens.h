// The special tokens that a Hugging Face folder names: bos_token, eos_token, unk_token and their like.
//
//   const Json map = read_special_tokens_map(folder);
//   const Json tokens = special_tokens_of(map, tokenizer_config);  // {"bos_token": "<s>", "eos_token": "</s>"}
//
// Pure but for the file that is read, thread-safe.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

namespace tessera::text {

// "bos_token" to "mask_token", in the order of transformers' SPECIAL_TOKENS_ATTRIBUTES, in which it adds those tokens
// that tokenizer.json lacks.
std::span<const char* const> special_token_keys();

// The JSON object that a configuration file holds; an empty one where there is no such file. Error kFormat, which
// begins with `where`, for text that is no JSON object.
nlohmann::ordered_json read_object_if_there(const std::filesystem::path& path, const std::string& where,
                                            size_t max_keys = JsonLimits{}.max_keys);
// special_tokens_map.json of the folder.
nlohmann::ordered_json read_special_tokens_map(const std::filesystem::path& folder);

// Name to text, of `config` (the folder's tokenizer_config.json; an empty object where there is none) and of `map`. As
// in transformers the map counts where the config lists no added_tokens_decoder; where it does, the map only names what
// the config leaves out.
nlohmann::ordered_json special_tokens_of(const nlohmann::ordered_json& map, const nlohmann::ordered_json& config);

}  // namespace tessera::text
