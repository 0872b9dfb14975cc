#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/models/gguf/gguf_tokenizer.h"

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
