// The special tokens that a Hugging Face folder names: bos_token, eos_token, unk_token and their like.
//
//   const Json tokens = special_tokens_of(folder, tokenizer_config);  // {"bos_token": "<s>", "eos_token": "</s>"}
//
// Pure but for the file that is read, thread-safe.
#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <span>

namespace tessera::text {

// "bos_token" to "mask_token", in the order of transformers' SPECIAL_TOKENS_ATTRIBUTES, in which it adds those tokens
// that tokenizer.json lacks.
std::span<const char* const> special_token_keys();

// Name to text, of `config` (the folder's tokenizer_config.json; an empty object where there is none) and of the
// folder's special_tokens_map.json. As in transformers the map counts where the config lists no added_tokens_decoder;
// where it does, the map only names what the config leaves out. Error kFormat for a map that is no JSON object.
nlohmann::ordered_json special_tokens_of(const std::filesystem::path& folder, const nlohmann::ordered_json& config);

}  // namespace tessera::text
