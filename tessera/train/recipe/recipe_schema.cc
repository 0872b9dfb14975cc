#include "tessera/train/recipe/recipe_schema.h"

#include <fmt/format.h>

#include <cmath>
#include <map>

namespace tessera::train {
namespace {

// Returns the range as text: ">= 1", "> 0" or "in [0, 1)"; empty for a range without a lower bound. A maximum of 1e6 or
// more is left out of the text: it only guards against overflow and is not worth a reader's attention.
std::string range_words(const ValueRange& range) {
  const bool low = std::isfinite(range.minimum);
  const bool high = std::isfinite(range.maximum) && range.maximum < 1e6;
  if (range.without_zero) return ">= 1, or -1";
  if (low && high) {
    return fmt::format("in {}{:g}, {:g}{}", range.above_minimum ? "(" : "[", range.minimum, range.maximum,
                       range.below_maximum ? ")" : "]");
  }
  if (low) return fmt::format("{} {:g}", range.above_minimum ? ">" : ">=", range.minimum);
  return "";
}

std::string with_range(std::string noun, const ValueRange& range) {
  const std::string words = range_words(range);
  return words.empty() ? noun : noun + " " + words;
}

// "a, b or c".
std::string join_with_or(const std::vector<const char*>& words) {
  std::string out;
  for (size_t i = 0; i < words.size(); ++i) {
    out += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + std::string(words[i]);
  }
  return out;
}

}  // namespace

const RecipeKey* find_recipe_key(std::string_view path) {
  static const std::map<std::string, const RecipeKey*, std::less<>> kByPath = [] {
    std::map<std::string, const RecipeKey*, std::less<>> by_path;
    for (const auto& key : recipe_keys()) {
      by_path.emplace(key.path(), &key);
      for (const char* alias : key.aliases) by_path.emplace(alias, &key);
    }
    return by_path;
  }();
  const auto found = kByPath.find(path);
  return found == kByPath.end() ? nullptr : found->second;
}

std::string accepted_values(const RecipeKey& key) {
  Recipe defaults;
  struct AcceptedValuesVisitor {
    const RecipeKey& key;
    std::string operator()(int64_t*) const { return with_range("integer", key.range); }
    std::string operator()(std::optional<int64_t>*) const { return with_range("integer", key.range) + ", or null"; }
    std::string operator()(double*) const { return with_range("number", key.range); }
    std::string operator()(bool*) const { return "true or false"; }
    std::string operator()(std::string*) const { return key.allowed.empty() ? "text" : join_with_or(key.allowed); }
    std::string operator()(std::vector<std::string>*) const {
      if (key.mappings == AcceptedMappings::kPairs) return "mapping";
      return key.mappings == AcceptedMappings::kSources ? "list of paths and mappings" : "list of texts";
    }
    std::string operator()(std::vector<double>*) const {
      return with_range(fmt::format("list of {} numbers", key.count), key.range);
    }
  };
  return std::visit(AcceptedValuesVisitor{key}, key.field(defaults));
}

}  // namespace tessera::train
