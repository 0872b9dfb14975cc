#include "tessera/train/recipe/recipe_value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"
#include "tessera/train/recipe/data_sources.h"

namespace tessera::train {
namespace {

constexpr size_t kLongestText = 4096;
using Kind = YamlNode::Kind;

std::string shown_node(const YamlNode& node) {
  switch (node.kind) {
    case Kind::kNull:
      return "null";
    case Kind::kScalar:
      return quote(node.text);
    case Kind::kSequence:
      return fmt::format("a list of {}", node.items.size());
    case Kind::kMapping:
      return "a mapping";
  }
  return "";
}

// YAML allows a leading "+", which parse_number() does not.
template <class Number>
std::optional<Number> yaml_number(std::string_view text) {
  if (text.size() > 1 && text.front() == '+' && text[1] != '-') text.remove_prefix(1);
  return parse_number<Number>(text);
}

bool in_range(double value, const ValueRange& range) {
  if (!std::isfinite(value) || value < range.minimum || value > range.maximum) return false;
  if (range.above_minimum && value == range.minimum) return false;
  if (range.below_maximum && value == range.maximum) return false;
  return !(range.without_zero && value == 0);
}

// The allowed word that `word` means: without regard to case, and for dtypes also in the spelling of other frameworks
// ("bf16", "torch.bfloat16"). A word that is not allowed is returned as it is, for the error message.
std::string canonical_word(const RecipeKey& key, std::string word) {
  const auto has = [&](std::string_view name) { return std::ranges::find(key.allowed, name) != key.allowed.end(); };
  if (has("bfloat16")) {
    if (word.rfind("torch.", 0) == 0) word.erase(0, 6);
    if (word == "bf16") return "bfloat16";
    if (word == "fp32" || word == "float") return "float32";
  }
  const auto lower = [](char c) { return std::tolower(static_cast<unsigned char>(c)); };
  const auto found = std::ranges::find_if(
      key.allowed, [&](std::string_view name) { return std::ranges::equal(name, word, {}, lower, lower); });
  return found == key.allowed.end() ? word : std::string(*found);
}

bool is_text(std::string_view text) {
  return text.size() <= kLongestText &&
         std::ranges::none_of(text, [](unsigned char c) { return c < 0x20 || c == 0x7f; });
}

// Visitor of FieldRef: each overload reads `node` into a field of one type. It returns false and leaves the field alone
// if the node has another type or is out of range. The type comes from the field, not from YAML: an unquoted 5 is text
// in a text field, and "5" in quotes is never a number.
struct FieldAssigner {
  const RecipeKey& key;
  const YamlNode& node;
  std::string where = {};

  template <class Number>
  bool assign_number(Number* field) const {
    if (node.kind != Kind::kScalar || node.quoted) return false;
    const auto value = yaml_number<Number>(node.text);
    if (!value || !in_range(static_cast<double>(*value), key.range)) return false;
    *field = *value;
    return true;
  }
  bool operator()(int64_t* field) const { return assign_number(field); }
  bool operator()(double* field) const { return assign_number(field); }
  bool operator()(std::optional<int64_t>* field) const {
    if (node.kind == Kind::kNull) {
      field->reset();
      return true;
    }
    int64_t value = 0;
    if (!(*this)(&value)) return false;
    *field = value;
    return true;
  }
  bool operator()(bool* field) const {
    if (node.kind != Kind::kScalar || node.quoted) return false;
    const bool yes = node.text == "true" || node.text == "True" || node.text == "TRUE";
    if (!yes && node.text != "false" && node.text != "False" && node.text != "FALSE") return false;
    *field = yes;
    return true;
  }
  bool operator()(std::string* field) const {
    if (node.kind != Kind::kScalar || !is_text(node.text)) return false;
    std::string word = canonical_word(key, node.text);
    if (key.required && word.empty()) return false;
    if (!key.allowed.empty() && std::ranges::find(key.allowed, word) == key.allowed.end()) return false;
    *field = std::move(word);
    return true;
  }
  bool operator()(std::vector<std::string>* field) const {
    std::vector<std::string> values;
    if (node.kind == Kind::kMapping && key.mappings == AcceptedMappings::kPairs) {
      for (const auto& [name, value] : node.entries) {
        if (value.kind != Kind::kScalar || !is_text(value.text)) return false;
        values.push_back(name + "=" + value.text);
      }
      *field = std::move(values);
      return true;
    }
    const auto append_item = [&](const YamlNode& item) {
      if (item.kind == Kind::kMapping && key.mappings == AcceptedMappings::kSources) {
        values.push_back(source_text(item, where));
        return true;
      }
      values.push_back(item.text);
      return item.kind == Kind::kScalar && !item.text.empty() && is_text(item.text);
    };
    if ((node.kind == Kind::kScalar || node.kind == Kind::kMapping) && !append_item(node)) return false;
    if (!std::ranges::all_of(node.items, append_item)) return false;
    *field = std::move(values);
    return true;
  }
  bool operator()(std::vector<double>* field) const {
    if (node.kind != Kind::kSequence || (key.count && node.items.size() != key.count)) return false;
    std::vector<double> values(node.items.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (!FieldAssigner{key, node.items[i]}(&values[i])) return false;
    }
    *field = std::move(values);
    return true;
  }
};

std::string format_number(double value) {
  std::string text = fmt::format("{}", value);
  // In YAML 1.1 a number with an exponent needs a decimal point: other readers take 1e-8 for text.
  const size_t exponent = text.find('e');
  if (text.find('.') == text.npos) text.insert(exponent == text.npos ? text.size() : exponent, ".0");
  return text;
}

// Whether `text` can be written without quotes and is read back as the same text. The test is stricter than YAML: only
// letters, digits, "_-./" and bytes of UTF-8; the first character is a letter, "/", or "." in a text that holds "/".
// true and false need no quotes, because assign_value() reads them as text for a text field.
bool is_plain_word(std::string_view text) {
  if (text.empty() || text == "null" || text == "Null" || text == "NULL" || text == "~") return false;
  if (text.front() == '-' && text.size() == 1) return false;
  return std::ranges::all_of(text,
                             [](unsigned char c) {
                               return std::isalnum(c) || c == '_' || c == '-' || c == '.' || c == '/' || c >= 0x80;
                             }) &&
         (std::isalpha(static_cast<unsigned char>(text.front())) || text.front() == '/' ||
          (text.front() == '.' && text.find('/') != text.npos));
}

struct FieldFormatter {
  std::string operator()(const int64_t* value) const { return fmt::format("{}", *value); }
  std::string operator()(const std::optional<int64_t>* value) const {
    return *value ? fmt::format("{}", **value) : "null";
  }
  std::string operator()(const double* value) const { return format_number(*value); }
  std::string operator()(const bool* value) const { return *value ? "true" : "false"; }
  std::string operator()(const std::string* value) const {
    return is_source_mapping(*value) ? *value : format_text(*value);
  }
  template <class Item>
  std::string operator()(const std::vector<Item>* values) const {
    std::string out = "[";
    for (size_t i = 0; i < values->size(); ++i) out += (i ? ", " : "") + (*this)(&(*values)[i]);
    return out + "]";
  }
};

}  // namespace

void assign_value(const RecipeKey& key, const YamlNode& node, const std::string& where, Recipe& recipe) {
  if (std::visit(FieldAssigner{key, node, where}, key.field(recipe))) return;
  raise(ErrorKind::kConfig, "[train.recipe] {}: {}: found {}, wanted {}.", where, key.path(), shown_node(node),
        accepted_values(key));
}

std::string format_value(const RecipeKey& key, const Recipe& recipe) {
  // The accessors of the key table return pointers to mutable fields; this visitor only reads.
  return std::visit(FieldFormatter{}, key.field(const_cast<Recipe&>(recipe)));
}

std::string format_text(std::string_view text) {
  if (is_plain_word(text)) return std::string(text);
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

}  // namespace tessera::train
