#include "tessera/text/grammar/json_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/text/json_numbers.h"

namespace tessera::text {
namespace {

constexpr int32_t kBlanks = 20, kDigits = 18, kFraction = 17, kExponent = 2;

// The ASCII characters that a JSON string may contain without escape: no quote, no backslash, no control character.
ByteSet plain_ascii() {
  ByteSet set;
  for (size_t byte = 0x20; byte < 0x80; ++byte) set.set(byte, byte != '"' && byte != '\\');
  return set;
}

ByteSet set_of(std::string_view bytes) {
  ByteSet set;
  for (const char each : bytes) set.set(static_cast<unsigned char>(each));
  return set;
}

}  // namespace

JsonParts::JsonParts(GrammarBuilder& build) : build_(build) {
  const auto blanks = build.repeat(build.bytes(set_of(" \t")), 0, kBlanks);
  space_ = build.choice({build.literal(""), build.literal(" "), build.sequence({build.literal("\n"), blanks})});
  comma_ = build.sequence({space_, build.literal(","), space_});
  colon_ = build.sequence({space_, build.literal(":"), space_});
  // Well-formed UTF-8 sequences of several bytes, from table 3-7 of the Unicode standard.
  const auto tail = build.range(0x80, 0xBF);
  const auto from = [&](int first, int last, int second, int second_last, size_t tails) {
    std::vector<PartId> parts = {build.range(first, last), build.range(second, second_last)};
    parts.insert(parts.end(), tails, tail);
    return build.sequence(parts);
  };
  multibyte_ =
      build.choice({build.sequence({build.range(0xC2, 0xDF), tail}), from(0xE0, 0xE0, 0xA0, 0xBF, 1),
                    from(0xE1, 0xEC, 0x80, 0xBF, 1), from(0xED, 0xED, 0x80, 0x9F, 1), from(0xEE, 0xEF, 0x80, 0xBF, 1),
                    from(0xF0, 0xF0, 0x90, 0xBF, 2), from(0xF1, 0xF3, 0x80, 0xBF, 2), from(0xF4, 0xF4, 0x80, 0x8F, 2)});
  plain_ = build.choice({build.bytes(plain_ascii()), multibyte_});
  // After \u come the hex digits of a code unit that is not a surrogate, or those of a high surrogate, \u and those of
  // a low surrogate.
  const auto hex = build.bytes(set_of("0123456789abcdefABCDEF"));
  const auto d = build.bytes(set_of("dD"));
  const auto unit = build.choice({build.sequence({build.bytes(set_of("0123456789abcefABCEF")), hex, hex, hex}),
                                  build.sequence({d, build.range('0', '7'), hex, hex})});
  const auto pair = build.sequence(
      {d, build.bytes(set_of("89abAB")), hex, hex, build.literal("\\u"), d, build.bytes(set_of("cdefCDEF")), hex, hex});
  const auto escape = build.choice(
      {build.bytes(set_of("\"\\/bfnrt")), build.sequence({build.literal("u"), build.choice({unit, pair})})});
  character_ = build.choice({plain_, build.sequence({build.literal("\\"), escape})});
  boolean_ = build.choice({build.literal("true"), build.literal("false")});
  null_ = build.literal("null");
  // A value may contain values, so its part is declared first and defined last.
  value_ = build.forward();
  const auto more_values = build.zero_or_more(build.sequence({comma(), value_}));
  const auto array = brackets(build.optional(build.sequence({value_, more_values})));
  const auto member = build.sequence({string(), colon(), value_});
  const auto more_members = build.zero_or_more(build.sequence({comma(), member}));
  object_ = braces(build.optional(build.sequence({member, more_members})));
  build.define(value_, build.choice({object_, array, string(), number(), boolean_, null_}));
}

JsonParts::PartId JsonParts::braces(PartId between) {
  return build_.sequence({build_.literal("{"), space_, between, space_, build_.literal("}")});
}

JsonParts::PartId JsonParts::brackets(PartId between) {
  return build_.sequence({build_.literal("["), space_, between, space_, build_.literal("]")});
}

JsonParts::PartId JsonParts::digits(int32_t min_count, int32_t max_count) {
  return build_.repeat(build_.range('0', '9'), min_count, max_count);
}

JsonParts::PartId JsonParts::number() {
  const auto whole =
      build_.choice({build_.literal("0"), build_.sequence({build_.range('1', '9'), digits(0, kDigits - 1)})});
  const auto fraction = build_.sequence({build_.literal("."), digits(1, kFraction)});
  const auto exponent =
      build_.sequence({build_.bytes(set_of("eE")), build_.optional(build_.bytes(set_of("+-"))), digits(1, kExponent)});
  return build_.sequence(
      {build_.optional(build_.literal("-")), whole, build_.optional(fraction), build_.optional(exponent)});
}

// Decimal numbers from `lowest` to `highest`, which have the same number of digits; lowest <= highest. With different
// first digits there are up to three cases: the first digit of `lowest`, then digits that are not below the other
// digits of `lowest`; the first digit of `highest`, then digits that are not above the other digits of `highest`; and a
// first digit between these two, then any digits.
JsonParts::PartId JsonParts::between(std::string_view lowest, std::string_view highest) {
  if (lowest.empty()) return build_.literal("");
  const auto lowest_first = build_.literal(lowest.substr(0, 1)), highest_first = build_.literal(highest.substr(0, 1));
  const auto lowest_rest = lowest.substr(1), highest_rest = highest.substr(1);
  if (lowest[0] == highest[0]) return build_.sequence({lowest_first, between(lowest_rest, highest_rest)});
  const std::string zeros(lowest_rest.size(), '0'), nines(lowest_rest.size(), '9');
  std::vector<PartId> ways;
  int first = lowest[0], last = highest[0];  // the range of first digits after which any digits may follow
  if (lowest_rest != zeros) {
    ways.push_back(build_.sequence({lowest_first, between(lowest_rest, nines)}));
    ++first;
  }
  if (highest_rest != nines) {
    ways.push_back(build_.sequence({highest_first, between(zeros, highest_rest)}));
    --last;
  }
  const auto rest = static_cast<int32_t>(lowest_rest.size());
  if (first <= last) ways.push_back(build_.sequence({build_.range(first, last), digits(rest, rest)}));
  return build_.choice(ways);
}

// Unsigned decimal numbers from `lowest` to `highest`; lowest <= highest. Each number of digits is a case of its own.
JsonParts::PartId JsonParts::unsigned_integer(const std::string& lowest, const std::string& highest) {
  std::vector<PartId> ways;
  for (size_t length = lowest.size(); length <= highest.size(); ++length) {
    const auto first = length == lowest.size() ? lowest : "1" + std::string(length - 1, '0');
    const auto last = length == highest.size() ? highest : std::string(length, '9');
    ways.push_back(between(first, last));
  }
  return build_.choice(ways);
}

JsonParts::PartId JsonParts::integer(int64_t lowest, int64_t highest) {
  const auto text = [](int64_t value) { return std::to_string(value); };
  std::vector<PartId> ways;
  if (highest >= 0) ways.push_back(unsigned_integer(text(std::max<int64_t>(lowest, 0)), text(highest)));
  if (lowest < 0) {
    const auto size = unsigned_integer(text(std::max<int64_t>(-highest, 1)), text(-lowest));
    ways.push_back(build_.sequence({build_.literal("-"), size}));
  }
  return build_.choice(ways);
}

// Unsigned numbers with an optional fraction between the bounds; lower.value >= 0. The cases: integer parts for which
// any fraction is within the bounds; lower.value with a fraction that is not zero, if this bound is open; upper.value
// with a zero fraction, if this bound is closed.
JsonParts::PartId JsonParts::unsigned_number(const NumberBound& lower, const NumberBound& upper) {
  const auto fraction = build_.optional(build_.sequence({build_.literal("."), digits(1, kFraction)}));
  const auto zeros =
      build_.optional(build_.sequence({build_.literal("."), build_.repeat(build_.literal("0"), 1, kFraction)}));
  std::vector<PartId> ways;
  const int64_t first = lower.value + lower.open;
  if (first < upper.value) {
    ways.push_back(
        build_.sequence({unsigned_integer(std::to_string(first), std::to_string(upper.value - 1)), fraction}));
  }
  if (lower.open && lower.value < upper.value) {  // numbers between lower.value and the next integer
    ways.push_back(build_.sequence({build_.literal(std::to_string(lower.value) + "."),
                                    build_.repeat(build_.literal("0"), 0, kFraction / 2), build_.range('1', '9'),
                                    digits(0, kFraction / 2)}));
  }
  const bool last = !upper.open && (upper.value > lower.value || !lower.open);
  if (last) ways.push_back(build_.sequence({build_.literal(std::to_string(upper.value)), zeros}));
  return build_.choice(ways);
}

JsonParts::PartId JsonParts::number(const std::optional<NumberBound>& lower, const std::optional<NumberBound>& upper) {
  const NumberBound low = lower.value_or(NumberBound{-kMaxInteger}), high = upper.value_or(NumberBound{kMaxInteger});
  std::vector<PartId> ways;
  if (high.value >= 0) ways.push_back(unsigned_number(low.value >= 0 ? low : NumberBound{0}, high));
  if (low.value < 0) {
    const NumberBound nearest =
        high.value < 0 ? NumberBound{-high.value, high.open} : NumberBound{0, true};  // excludes -0
    ways.push_back(build_.sequence({build_.literal("-"), unsigned_number(nearest, {-low.value, low.open})}));
  }
  return build_.choice(ways);
}

JsonParts::PartId JsonParts::quoted(PartId characters) {
  return build_.sequence({build_.literal("\""), characters, build_.literal("\"")});
}

JsonParts::PartId JsonParts::string(int32_t min_length, std::optional<int32_t> max_length) {
  return quoted(max_length ? build_.repeat(character_, min_length, *max_length)
                           : build_.repeat(character_, min_length));
}

JsonParts::PartId JsonParts::literal(const Json& value) { return build_.literal(dump_json(value)); }

JsonParts::PartId JsonParts::one_of(const std::vector<std::string>& texts) {
  return build_.one_of({texts.begin(), texts.end()});
}

// The returned part accepts only keys without escape sequences, so no key that it accepts equals a name with a
// character that must be escaped. Names with such a character therefore need not be excluded and are not added to
// `texts`.
JsonParts::PartId JsonParts::key_none_of(const std::vector<std::string>& names) {
  const auto plain = plain_ascii();
  const auto needs_escape = [&](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x80 && !plain.test(byte);
  };
  std::vector<std::string_view> texts;
  for (const auto& name : names) {
    if (std::ranges::none_of(name, needs_escape)) texts.push_back(name);
  }
  const auto after = build_.sequence({build_.zero_or_more(plain_), build_.literal("\"")});
  return build_.sequence(
      {build_.literal("\""),
       build_.none_of_texts(
           texts, {.end = '"', .characters = plain, .after = after, .wide = build_.sequence({multibyte_, after})})});
}

}  // namespace tessera::text
