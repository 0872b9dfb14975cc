#include "tessera/text/tokenizer/special_tokens.h"

#include <array>
#include <nlohmann/json.hpp>

#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"

namespace tessera::text {
namespace {

constexpr std::array<const char*, 7> kNames = {"bos_token", "eos_token", "unk_token", "sep_token",
                                               "pad_token", "cls_token", "mask_token"};

// Copies the text of token `name` from `from` to `tokens`, if it is there. A token is a string, or an object with
// "content".
void copy_token(const Json& from, const char* name, Json& tokens) {
  const auto found = from.find(name);
  if (found == from.end()) return;
  if (found->is_string()) tokens[name] = *found;
  if (found->is_object() && found->contains("content") && found->at("content").is_string()) {
    tokens[name] = found->at("content");
  }
}

}  // namespace

std::span<const char* const> special_token_keys() { return kNames; }

Json read_optional_json_object(const std::filesystem::path& path, const std::string& where, size_t max_keys) {
  constexpr size_t kMaxBytes = size_t{64} << 20;
  if (!std::filesystem::exists(path)) return Json::object();
  return parse_json_object(read_file(path, kMaxBytes), where, {.max_bytes = kMaxBytes, .max_keys = max_keys});
}

Json read_special_tokens_map(const std::filesystem::path& folder) {
  const auto path = folder / "special_tokens_map.json";
  return read_optional_json_object(path, "[text.load] " + path.string());
}

Json special_tokens_of(const Json& map, const Json& config) {
  Json tokens = Json::object();
  for (const char* name : kNames) copy_token(config, name, tokens);
  const bool map_counts = !config.contains("added_tokens_decoder");
  for (const char* name : kNames) {
    if (map_counts || !config.contains(name)) copy_token(map, name, tokens);
  }
  return tokens;
}

}  // namespace tessera::text
