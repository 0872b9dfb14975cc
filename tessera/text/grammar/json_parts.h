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
  using Part = Grammar::Part;
  // Borrows the builder.
  explicit JsonParts(GrammarBuilder& build);

  static constexpr int64_t kLargest = 999'999'999'999'999'999;  // integers are from -kLargest to kLargest

  Part space() const { return space_; }
  Part boolean() const { return boolean_; }
  Part null() const { return null_; }
  Part number();
  // A number without exponent between two integer bounds. An open bound excludes its value. nullopt is the largest
  // number of 18 digits, or its negative. At least one number must be between the bounds.
  struct Bound {
    int64_t value;
    bool open = false;
  };
  Part number(const std::optional<Bound>& least, const std::optional<Bound>& most);
  Part integer(int64_t least = -kLargest, int64_t most = kLargest);  // both included; least <= most
  // A string of `least` to `most` characters (nullopt: no limit). An escape sequence counts as one character.
  Part string(int32_t least = 0, std::optional<int32_t> most = std::nullopt);
  Part quoted(Part characters);  // `characters` in double quotes
  Part any_value() const { return value_; }
  Part any_object() const { return object_; }
  // Exactly this value, in the form of dump_json.
  Part literal(const Json& value);
  // One of several values, given by their JSON texts.
  Part one_of(const std::vector<std::string>& texts);
  // A string without escape sequences that is not one of `names`.
  Part key_other_than(const std::vector<std::string>& names);

  // `between` in braces or brackets, with whitespace on both sides.
  Part braces(Part between);
  Part brackets(Part between);
  Part comma() const { return comma_; }
  Part colon() const { return colon_; }
  GrammarBuilder& builder() { return build_; }

 private:
  Part digits(int32_t least, int32_t most);
  Part magnitude(const std::string& least, const std::string& most);
  Part between(std::string_view least, std::string_view most);
  Part size_between(const Bound& least, const Bound& most);

  GrammarBuilder& build_;
  Part space_, comma_, colon_, multibyte_, plain_, character_, boolean_, null_, value_, object_;
};

}  // namespace tessera::text
