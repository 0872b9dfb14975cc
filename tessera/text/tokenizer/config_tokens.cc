#include "tessera/text/tokenizer/config_tokens.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tessera/base/text/number.h"
#include "tessera/text/tokenizer/special_tokens.h"

namespace tessera::text {
namespace {

AddedToken token_of_object(const JsonReader& node) {
  AddedToken token;
  token.content = node.string("content");
  token.special = node.boolean("special", false);
  token.single_word = node.boolean("single_word", false);
  token.lstrip = node.boolean("lstrip", false);
  token.rstrip = node.boolean("rstrip", false);
  token.normalized = node.boolean("normalized", !token.special);
  return token;
}

struct ConfigToken {
  AddedToken token;
  bool has_flags;
  bool operator==(const ConfigToken&) const = default;
};

// Reads a token: a string, or an object with flags. nullopt for a value of any other type.
std::optional<ConfigToken> token_of(const JsonReader& node) {
  if (node.is_object()) return ConfigToken{token_of_object(node), true};
  if (!node.value().is_string()) return std::nullopt;
  ConfigToken named{{}, false};
  named.token.content = node.as_string();
  return named;
}

// Collects the tokens in the order in which transformers 5 adds them, with its rules for duplicates and flags.
class ConfigTokenCollector {
 public:
  ConfigTokenCollector(const JsonReader& config, const JsonReader& file) {
    const bool has_decoder = config.has("added_tokens_decoder");
    if (has_decoder) {
      std::map<int64_t, AddedToken> by_id;
      for (const auto& [id, node] : config.at("added_tokens_decoder").members()) {
        by_id[parse_number<int64_t>(id).value_or(-1)] = token_of_object(node);
      }
      for (auto& [id, token] : by_id) {
        known_.insert_or_assign(token.content, token);
        tokens_.push_back(std::move(token));
      }
    }
    if (!file.has("added_tokens")) return;
    for (const auto& node : file.at("added_tokens").items()) {
      auto token = token_of_object(node);
      if (has_decoder) {
        tokenizer_json_texts_.insert(std::move(token.content));
      } else {
        known_.insert_or_assign(token.content, std::move(token));
      }
    }
  }
  // Adds the token unless an equal one was added before. Tokens with the same text and different flags are all added;
  // later steps use the last one. A token given as a string never equals one given as an object.
  void add(const ConfigToken& named) {
    auto& before = named_[named.token.content];
    if (std::ranges::find(before, named) != before.end()) return;
    before.push_back(named);
    auto token = named.token;
    const auto found = known_.find(token.content);
    // With an added_tokens_decoder, a token of tokenizer.json that the decoder does not list keeps its own flags.
    if (found == known_.end() && tokenizer_json_texts_.contains(token.content)) return;
    if (found != known_.end()) token = found->second;
    token.special = true;
    tokens_.push_back(std::move(token));
  }
  // Adds a token of the list "extra_special_tokens" or "additional_special_tokens". Does nothing when known_ has the
  // token's text: the flags of this text are then already known from the configuration's "added_tokens_decoder" or, if
  // the configuration has no "added_tokens_decoder", from tokenizer.json.
  void add_listed(const ConfigToken& named) {
    if (!known_.contains(named.token.content)) add(named);
  }
  std::vector<AddedToken> take() { return std::move(tokens_); }

 private:
  std::unordered_map<std::string, AddedToken> known_;  // tokens with known flags, by text
  // The texts of the added tokens of tokenizer.json, if the configuration has an added_tokens_decoder; otherwise empty.
  std::unordered_set<std::string> tokenizer_json_texts_;
  std::unordered_map<std::string, std::vector<ConfigToken>> named_;  // arguments of add() so far, by text
  std::vector<AddedToken> tokens_;
};

}  // namespace

std::vector<AddedToken> read_config_tokens(const JsonReader& config, const JsonReader& file) {
  ConfigTokenCollector named(config, file);
  const auto add = [&](const JsonReader& node) {
    const auto token = token_of(node);
    if (token) named.add(*token);
    return token.has_value();
  };
  const auto standard = special_token_keys();
  for (const std::string key : standard) {
    if (config.has(key)) add(config.at(key));
  }
  // True when a token has been found under a key of the model's own ("image_token", ...) or in the object
  // "extra_special_tokens"; as in transformers, "model_specific_special_tokens" is then ignored.
  bool has_own = false;
  for (const auto& [key, node] : config.members()) {
    const bool is_own = key.ends_with("_token") && std::ranges::find(standard, key) == standard.end();
    if (is_own && add(node)) has_own = true;
  }
  const auto add_members = [&](const char* key) {
    if (!config.has(key) || !config.at(key).is_object()) return;
    for (const auto& [name, node] : config.at(key).members()) has_own |= add(node);
  };
  add_members("extra_special_tokens");
  if (!has_own) add_members("model_specific_special_tokens");
  const auto is_list = [&](const char* key) { return config.has(key) && config.at(key).is_array(); };
  const bool has_extra = is_list("extra_special_tokens") && !config.at("extra_special_tokens").value().empty();
  const char* list = has_extra ? "extra_special_tokens" : "additional_special_tokens";
  if (is_list(list)) {
    for (const auto& node : config.at(list).items()) {
      if (const auto token = token_of(node)) named.add_listed(*token);
    }
  }
  return named.take();
}

}  // namespace tessera::text
