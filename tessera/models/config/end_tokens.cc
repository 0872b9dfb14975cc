#include "tessera/models/config/end_tokens.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/text/chat/turn_end.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr JsonLimits kGenerationConfigLimits{.max_bytes = 1 << 20, .max_depth = 32};

// Reads the folder's generation_config.json; returns an empty object when there is no such file.
Json read_generation_config(const fs::path& path) {
  if (!fs::exists(path)) return Json::object();
  const auto text = read_file(path, kGenerationConfigLimits.max_bytes);
  return parse_json_object(text, "[models.generate] " + path.string(), kGenerationConfigLimits);
}

void add_once(std::vector<int64_t>& ends, int64_t token, int64_t vocab_size) {
  const bool is_new = std::ranges::find(ends, token) == ends.end();
  if (is_new && token >= 0 && token < vocab_size) ends.push_back(token);
}

}  // namespace

std::vector<int64_t> listed_end_tokens(const fs::path& dir, const ModelConfig& config) {
  const auto path = dir / "generation_config.json";
  const Json json = read_generation_config(path);
  const JsonReader settings(json, "[models.generate] " + path.string(), ErrorKind::kConfig);
  return settings.has("eos_token_id") ? settings.integers("eos_token_id", 0, config.vocab_size - 1)
                                      : config.eos_token_ids;
}

std::vector<int64_t> end_tokens(const fs::path& dir, const ModelConfig& config, const text::Tokenizer& tokenizer,
                                const std::optional<text::ChatTemplate>& chat) {
  std::vector<int64_t> ends;
  for (const int64_t token : listed_end_tokens(dir, config)) add_once(ends, token, config.vocab_size);
  if (const auto eos = tokenizer.eos_id()) add_once(ends, *eos, config.vocab_size);
  if (const auto turn_end = chat ? text::turn_end_token(*chat, tokenizer) : std::nullopt) {
    add_once(ends, *turn_end, config.vocab_size);
  }
  return ends;
}

void warn_of_unlisted_ends(const fs::path& dir, const ModelConfig& config, const text::Tokenizer& tokenizer,
                           std::span<const int64_t> ends) {
  const auto listed = listed_end_tokens(dir, config);
  std::vector<std::string> unlisted;
  for (const int64_t token : ends) {
    const bool is_listed = std::ranges::find(listed, token) != listed.end();
    if (is_listed || tokenizer.eos_id() == token) continue;
    unlisted.push_back(fmt::format("{} ({})", quote(tokenizer.id_to_token(static_cast<text::TokenId>(token))), token));
  }
  if (unlisted.empty()) return;
  log_warning(
      "[models.generate] {}: texts end at {}, too, because the chat template ends a turn with it; eos_token_id of "
      "generation_config.json does not list it, so other programs continue after it.",
      dir.string(), fmt::join(unlisted, ", "));
}

std::optional<text::ChatTemplate> find_chat_template(const fs::path& dir) {
  try {
    return text::ChatTemplate::from_folder(dir);
  } catch (const Error& error) {
    log_warning("{} Continuing without a chat template.", error.what());
    return std::nullopt;
  }
}

std::vector<int64_t> end_tokens(const fs::path& dir, const ModelConfig& config) {
  if (!fs::exists(dir / "tokenizer.json")) return listed_end_tokens(dir, config);
  return end_tokens(dir, config, text::Tokenizer::from_folder(dir), find_chat_template(dir));
}

// Writes `ends` as eos_token_id of generation_config.json. The order of end tokens has no meaning, so the file is not
// rewritten when listed_end_tokens() returns the tokens of `ends` in another order.
void write_end_tokens(const fs::path& dir, std::span<const int64_t> ends, const ModelConfig& config) {
  const auto listed = listed_end_tokens(dir, config);
  const std::set<int64_t> before(listed.begin(), listed.end()), wanted(ends.begin(), ends.end());
  if (wanted.empty() || before == wanted) return;
  const auto path = dir / "generation_config.json";
  Json settings = read_generation_config(path);
  Json ids = Json::array();
  for (const int64_t token : ends) ids.push_back(token);
  settings["eos_token_id"] = ids.size() == 1 ? Json(ids[0]) : ids;
  publish_file(path, settings.dump(2) + "\n");
  log_info("[models.generate] {}: eos_token_id is now {}, before it was {}", path.string(), fmt::join(ends, ", "),
           listed.empty() ? "none" : fmt::format("{}", fmt::join(listed, ", ")));
}

}  // namespace tessera
