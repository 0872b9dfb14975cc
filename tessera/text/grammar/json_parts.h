// The parts of JSON texts for a grammar.
//
//   GrammarBuilder build;
//   JsonParts json(build);
//   const auto grammar = std::move(build).finish(json.any_object());
//
// Texts are JSON in valid UTF-8 whose numbers a double or an int64 holds, but for values that literal() is given:
// integers have at most 18 digits, exponents at most two. Between the parts of arrays and objects stands nothing, a
// space, or a new line with up to 20 blanks, so that a model cannot fill its answer with blanks. One thread at a time.
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

  static constexpr int64_t kLargest = 999'999'999'999'999'999;  // and its negative

  Part space() const { return space_; }
  Part boolean() const { return boolean_; }
  Part null() const { return null_; }
  Part number();
  // A number within bounds that are whole, written without exponent; open: the bound itself is not taken. None: as far
  // as 18 digits go. Not empty.
  struct Bound {
    int64_t value;
    bool open = false;
  };
  Part number(const std::optional<Bound>& least, const std::optional<Bound>& most);
  Part integer(int64_t least = -kLargest, int64_t most = kLargest);  // both included; least <= most
  // So many characters, escapes counted as what they stand for.
  Part string(int32_t least = 0, std::optional<int32_t> most = std::nullopt);
  Part quoted(Part characters);
  Part any_value() const { return value_; }
  Part any_object() const { return object_; }
  // That value and no other, as dump_json writes it; and one of several values by their texts.
  Part literal(const Json& value);
  Part one_of(const std::vector<std::string>& texts);
  // Some string, written without escapes, that is none of these.
  Part key_other_than(const std::vector<std::string>& names);

  // "{" and "}" around what is between, with its spaces; so "[" and "]".
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
