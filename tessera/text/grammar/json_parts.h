// Grammar parts for JSON: numbers, strings, arrays, objects, literals.
//
//   GrammarBuilder build;
//   JsonParts json(build);
//   const auto grammar = std::move(build).finish(json.any_object());
//
// All texts are JSON in valid UTF-8. Numbers fit in a double or an int64: integers have at most 18 digits, exponents at
// most two; values that are passed to literal() have no such limit. The whitespace between the elements of arrays and
// objects is empty, one space, or a newline with up to 20 spaces or tabs, so a model cannot fill its answer with
// whitespace. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/text/json.h"
#include "tessera/text/grammar/grammar.h"

namespace tessera::text {

class JsonParts {
 public:
  using PartId = Grammar::PartId;
  // Keeps a reference to `build`, which must outlive this object.
  explicit JsonParts(GrammarBuilder& build);

  static constexpr int64_t kMaxInteger = 999'999'999'999'999'999;  // integers are from -kMaxInteger to kMaxInteger

  PartId space() const { return space_; }
  PartId boolean() const { return boolean_; }
  PartId null() const { return null_; }
  PartId number();
  // A number without exponent between two integer bounds. An open bound excludes its value. A lower bound of nullopt is
  // -kMaxInteger, an upper bound of nullopt is kMaxInteger. At least one number must be between the bounds.
  struct NumberBound {
    int64_t value;
    bool open = false;
  };
  PartId number(const std::optional<NumberBound>& lower, const std::optional<NumberBound>& upper);
  PartId integer(int64_t lowest = -kMaxInteger, int64_t highest = kMaxInteger);  // both included; lowest <= highest
  // A string of `min_length` to `max_length` characters (nullopt: no limit). An escape sequence counts as one
  // character.
  PartId string(int32_t min_length = 0, std::optional<int32_t> max_length = std::nullopt);
  PartId quoted(PartId characters);  // `characters` in double quotes
  PartId any_value() const { return value_; }
  PartId any_object() const { return object_; }
  // Exactly the text that dump_json(value) returns.
  PartId literal(const Json& value);
  // One of several values, given by their JSON texts.
  PartId one_of(const std::vector<std::string>& texts);
  // A string without escape sequences that is not one of `names`.
  PartId key_none_of(const std::vector<std::string>& names);

  // `between` in braces or brackets, with optional whitespace before and after `between`.
  PartId braces(PartId between);
  PartId brackets(PartId between);
  PartId comma() const { return comma_; }
  PartId colon() const { return colon_; }
  GrammarBuilder& builder() { return build_; }

 private:
  PartId digits(int32_t min_count, int32_t max_count);
  PartId unsigned_integer(const std::string& lowest, const std::string& highest);
  PartId between(std::string_view lowest, std::string_view highest);
  PartId unsigned_number(const NumberBound& lower, const NumberBound& upper);

  GrammarBuilder& build_;
  PartId space_, comma_, colon_, multibyte_, plain_, character_, boolean_, null_, value_, object_;
};

}  // namespace tessera::text
