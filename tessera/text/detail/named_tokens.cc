#include "tessera/text/detail/named_tokens.h"

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/number.h"

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

class NamedTokens {
 public:
  NamedTokens(const JsonReader& config, const JsonReader& file) {
    if (config.has("added_tokens_decoder")) {
      std::map<int64_t, AddedToken> by_id;
      for (const auto& [id, node] : config.at("added_tokens_decoder").members()) {
        by_id[parse_number<int64_t>(id).value_or(-1)] = token_of_object(node);
      }
      for (auto& [id, token] : by_id) {
        known_.insert_or_assign(token.content, token);
        tokens_.push_back(std::move(token));
      }
      if (file.has("added_tokens")) {
        for (const auto& node : file.at("added_tokens").items()) of_file_.insert(node.string("content"));
      }
    } else if (file.has("added_tokens")) {
      for (const auto& node : file.at("added_tokens").items()) {
        auto token = token_of_object(node);
        known_.insert_or_assign(token.content, std::move(token));
      }
    }
  }
  // A string, or an object with its flags. Any other value names no token.
  void add(const JsonReader& node) {
    const bool is_object = node.is_object();
    if (!is_object && !node.value().is_string()) return;
    AddedToken token;
    if (is_object) token = token_of_object(node);
    if (!is_object) token.content = node.as_string();
    const auto found = known_.find(token.content);
    // Beside an added_tokens_decoder, a token of tokenizer.json that it does not list keeps its flags.
    if (found == known_.end() && of_file_.contains(token.content)) return;
    if (found != known_.end()) token = found->second;
    token.special = true;
    tokens_.push_back(std::move(token));
  }
  // A token of the list of further special ones: one that a file has added already keeps its flags.
  void add_listed(const JsonReader& node) {
    const bool is_object = node.is_object();
    if (!is_object && !node.value().is_string()) return;
    const std::string content = is_object ? node.string("content") : node.as_string();
    if (!known_.contains(content)) add(node);
  }
  std::vector<AddedToken> take() { return std::move(tokens_); }

 private:
  std::unordered_map<std::string, AddedToken> known_;  // by their text
  std::unordered_set<std::string> of_file_;            // texts of tokenizer.json's; empty without added_tokens_decoder
  std::vector<AddedToken> tokens_;
};

}  // namespace

std::vector<AddedToken> named_tokens(const JsonReader& config, const JsonReader& file) {
  NamedTokens named(config, file);
  for (const auto& [key, node] : config.members()) {
    if (key.ends_with("_token")) named.add(node);
  }
  const bool has_extra = config.has("extra_special_tokens") && !config.at("extra_special_tokens").value().empty();
  const char* list = has_extra ? "extra_special_tokens" : "additional_special_tokens";
  if (config.has(list)) {
    const auto tokens = config.at(list);
    if (tokens.is_array()) {
      for (const auto& node : tokens.items()) named.add_listed(node);
    } else if (tokens.is_object()) {
      for (const auto& [name, node] : tokens.members()) named.add_listed(node);
    }
  }
  return named.take();
}

}  // namespace tessera::text
