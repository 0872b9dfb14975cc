// The definitions that importing and exporting a tokenizer share.
#include "tessera/models/gguf/gguf_tokenizer.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/formats/gguf/gguf.h"

namespace tessera {

const std::vector<PreTokenizerKind>& pre_tokenizer_kinds() {
  static const std::vector<PreTokenizerKind> kinds = {
      {.gguf_names = {"smollm", "starcoder", "refact"}, .split_regexes = {}, .digits = true, .byte_level_regex = true},
      {.gguf_names = {"llama-bpe", "llama3", "llama-v3"},
       .split_regexes =
           {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
            R"(\s*[\r\n]+|\s+(?!\S)|\s+)"},
       .ignore_merges = true,
       .add_bos = true},
      {.gguf_names = {"qwen2", "deepseek-r1-qwen"},
       .split_regexes = {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
                         R"(\s*[\r\n]+|\s+(?!\S)|\s+)"},
       .nfc = true},
      {.gguf_names = {"gpt-2"}, .split_regexes = {}, .byte_level_regex = true},
      {.gguf_names = {kDefaultPreTokenizer},
       .split_regexes = {R"([\p{P}\$\+<=>\^~\|]+)",
                         R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S))", R"(\p{N}+)",
                         R"([0-9][0-9][0-9])"}},
  };
  return kinds;
}

// kEnds is llama.cpp's list of tokens that end a text (llama-vocab.cpp), without </s> and <eos>. These two are left out
// because in a file each of them is either the token of eos_token_id, which gguf_end_tokens() adds by its id, or an
// ordinary token for an HTML tag.
bool is_known_end(std::string_view token) {
  static constexpr std::array<std::string_view, 18> kEnds = {
      "<|im_end|>",      "<|eot_id|>",
      "<|eom_id|>",      "<end_of_turn>",
      "<|end|>",         "<|endoftext|>",
      "<|end_of_text|>", "<end_of_utterance>",
      "<|return|>",      "<|call|>",
      "<|calls|>",       "<|flush|>",
      "<EOT>",           "_<EOT>",
      "[EOT]",           "[EOS]",
      "<turn|>",         "<\uff5cend\u2581of\u2581sentence\uff5c>"};
  return std::ranges::find(kEnds, token) != kEnds.end();
}

std::vector<uint64_t> gguf_end_tokens(const GgufFile& file, int64_t vocab) {
  std::vector<uint64_t> ends;
  const auto add = [&](uint64_t id) {
    const bool is_row = id < static_cast<uint64_t>(vocab);
    if (is_row && std::ranges::find(ends, id) == ends.end()) ends.push_back(id);
  };
  for (const char* key : {"eos", "eot", "eom"}) {
    if (const auto id = file.find_uint(std::string("tokenizer.ggml.") + key + "_token_id")) add(*id);
  }
  const auto* tokens = file.find_strings("tokenizer.ggml.tokens");
  for (size_t id = 0; tokens != nullptr && id < tokens->size(); ++id) {
    if (is_known_end((*tokens)[id])) add(id);
  }
  return ends;
}

std::string json_text(const nlohmann::ordered_json& json, const std::string& where, int indent) {
  try {
    return json.dump(indent) + "\n";
  } catch (const nlohmann::json::exception& error) {
    raise(ErrorKind::kFormat, "[gguf] {}: a string cannot be written as JSON: {}", where, error.what());
  }
}

Json read_json_object(const std::filesystem::path& path) {
  constexpr JsonLimits kLimits{.max_bytes = size_t{256} << 20, .max_keys = 16'000'000};
  return parse_json_object(read_file(path, kLimits.max_bytes), "[gguf] " + path.string(), kLimits);
}

}  // namespace tessera
