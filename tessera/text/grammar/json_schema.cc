#include "tessera/text/grammar/json_schema.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"

namespace tessera::text {
namespace {

constexpr size_t kLongestName = 512;
constexpr int64_t kMostItems = 1'000'000, kMostSchemas = 10'000, kMostDepth = 200, kMostLiteralBytes = 1 << 20;
constexpr size_t kMostReferences = 1000;

const std::set<std::string>& annotations() {
  static const std::set<std::string> keys = {"title",    "description", "default",  "examples",     "$schema",
                                             "$id",      "$comment",    "$defs",    "definitions",  "deprecated",
                                             "readOnly", "writeOnly",   "nullable", "discriminator"};
  return keys;
}

// The keywords that restrict values of each type. They do not restrict values of other types.
const std::map<std::string, std::set<std::string>>& keys_of_types() {
  static const std::set<std::string> bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
  static const std::map<std::string, std::set<std::string>> keys = {
      {"string", {"minLength", "maxLength", "format"}},
      {"integer", bounds},
      {"number", bounds},
      {"array", {"items", "prefixItems", "minItems", "maxItems"}},
      {"object", {"properties", "required", "additionalProperties"}},
      {"boolean", {}},
      {"null", {}}};
  return keys;
}

// The keys of a schema that are not annotations. A key with the value null counts as absent, except "const".
std::vector<std::string> restricting_keys(const JsonReader& schema) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : schema.value().get_ref<const Json::object_t&>()) {
    if (!annotations().contains(key) && (!value.is_null() || key == "const")) keys.push_back(key);
  }
  return keys;
}

void check_no_other_keys(const JsonReader& schema, const std::string& key, const std::set<std::string>& beside = {}) {
  for (const auto& other : restricting_keys(schema)) {
    if (other == key || beside.contains(other)) continue;
    schema.fail(fmt::format("{} together with {}", quote(other), quote(key)), fmt::format("{} alone", quote(key)));
  }
}

bool is_of_type(const Json& value, const std::string& type) {
  const auto digits = exact_digits(value);
  if (type == "integer") {
    const bool whole = value.is_number_float() && std::floor(value.get<double>()) == value.get<double>();
    return value.is_number_integer() || whole || (digits && is_integer_text(*digits));
  }
  if (type == "number") return value.is_number() || digits;
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  return type == "array" ? value.is_array() : value.is_object();
}

// The keys that may stand beside "const" or "enum". Only listed values that satisfy these keys are in the grammar.
const std::set<std::string>& keys_allowed_with_values() {
  static const std::set<std::string> keys = {
      "type", "const", "enum", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
  return keys;
}

// The value of a number; nullopt for other values. A long double represents every 64-bit integer exactly.
std::optional<long double> numeric_value(const Json& value) {
  if (const auto digits = exact_digits(value)) return std::strtold(std::string(*digits).c_str(), nullptr);
  if (value.is_number_unsigned()) return static_cast<long double>(value.get<uint64_t>());
  if (value.is_number_integer()) return static_cast<long double>(value.get<int64_t>());
  if (value.is_number()) return static_cast<long double>(value.get<double>());
  return std::nullopt;
}

// Whether `value` satisfies the lengths (in characters, for strings) and the bounds (for numbers) of the schema. Values
// of other types always do.
bool is_within_bounds(const JsonReader& schema, const Json& value) {
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    const auto length =
        std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
    const auto least = schema.integer("minLength", 0, 0, kMostItems);
    return length >= least && (!schema.has("maxLength") || length <= schema.integer("maxLength", 0, 0, kMostItems));
  }
  const auto number = numeric_value(value);
  if (!number) return true;
  const auto holds = [&](const char* key, auto compare) {
    const auto given = schema.find(key);
    if (!given) return true;
    const auto bound = numeric_value(given->value());
    if (!bound) given->fail("a number");
    return compare(*number, *bound);
  };
  return holds("minimum", std::greater_equal<>()) && holds("maximum", std::less_equal<>()) &&
         holds("exclusiveMinimum", std::greater<>()) && holds("exclusiveMaximum", std::less<>());
}

// The types in "type". Without this key, the types for which the schema has keywords; empty when it has none.
std::vector<std::string> types_of(const JsonReader& schema) {
  std::vector<std::string> types;
  if (const auto given = schema.find("type")) {
    if (given->is_array()) {
      for (const auto& each : given->items()) types.push_back(each.as_string());
    } else {
      types.push_back(given->as_string());
    }
    for (const auto& type : types) {
      if (!keys_of_types().contains(type)) given->fail("string, integer, number, boolean, null, array or object");
    }
    if (types.empty()) given->fail("at least one type");
    return types;
  }
  const auto there = restricting_keys(schema);
  for (const auto& [type, keys] : keys_of_types()) {
    if (type == "integer") continue;  // integers have the keywords of numbers
    if (std::ranges::any_of(there, [&, of = keys](const auto& key) { return of.contains(key); })) types.push_back(type);
  }
  return types;
}

}  // namespace

JsonSchema::JsonSchema(JsonParts& json, const JsonReader& document)
    : build_(json.builder()), document_(document), json_(json) {}

// The root and the targets of $ref are forward parts (GrammarBuilder::forward). They are created before their schema is
// read, so a schema may refer to itself.
JsonSchema::PartId JsonSchema::value() {
  const auto root = build_.forward();
  references_["#"] = root;
  build_.define(root, part_of(document_));
  return root;
}

JsonSchema::PartId JsonSchema::part_of(const JsonReader& schema) {
  if (++schemas_ > kMostSchemas) schema.fail(fmt::format("at most {} schemas in all", kMostSchemas));
  if (++depth_ > kMostDepth) schema.fail(fmt::format("at most {} schemas inside one another", kMostDepth));
  const auto part = read(schema);
  --depth_;
  return part;
}

// Converts one schema. Keywords are checked in the order $ref, const, enum, anyOf/oneOf/allOf, types; the first one
// that is present decides. A keyword that cannot be combined with this one is an error.
JsonSchema::PartId JsonSchema::read(const JsonReader& schema) {
  if (schema.value().is_boolean()) {
    if (!schema.value().get<bool>()) schema.fail("a schema that allows at least one value");
    return json_.any_value();
  }
  if (!schema.is_object()) schema.fail("a schema: an object, or true");
  if (const auto to = schema.find("$ref")) {
    check_no_other_keys(schema, "$ref");
    return resolve_reference(*to);
  }
  const auto list = schema.find("enum");
  if (const auto one = schema.member("const")) {
    check_no_other_keys(schema, "const", keys_allowed_with_values());
    const auto held = [&](const JsonReader& each) { return each.value() == one->value(); };
    if (list && std::ranges::none_of(list->items(), held)) {
      schema.fail(fmt::format("the const {}, which the enum lacks", quote(dump_json(one->value()))),
                  "a const that the enum holds");
    }
    return literals(schema, {one->value()});
  }
  if (list) {
    check_no_other_keys(schema, "enum", keys_allowed_with_values());
    std::vector<Json> values;
    for (const auto& each : list->items()) values.push_back(each.value());
    return literals(schema, values);
  }
  for (const char* key : {"anyOf", "oneOf", "allOf"}) {
    const auto list = schema.find(key);
    if (!list) continue;
    check_no_other_keys(schema, key);
    const auto schemas = list->items();
    if (schemas.empty()) list->fail("at least one schema");
    if (key == std::string_view("allOf") && schemas.size() > 1) list->fail("one schema: several are not supported");
    std::vector<PartId> ways;
    for (const auto& each : schemas) ways.push_back(part_of(each));
    return build_.choice(ways);
  }
  const auto types = types_of(schema);
  for (const auto& key : restricting_keys(schema)) {
    const bool known = key == "type" || std::ranges::any_of(types, [&](const auto& type) {
                         return keys_of_types().at(type).contains(key);
                       });
    if (!known) {
      schema.fail(quote(key), types.empty()
                                  ? "type, or a key that is supported"
                                  : fmt::format("keys of type {} that are supported", fmt::join(types, ", ")));
    }
  }
  if (types.empty()) return json_.any_value();
  std::vector<PartId> ways;
  for (const auto& type : types) ways.push_back(of_type(schema, type));
  return build_.choice(ways);
}

JsonSchema::PartId JsonSchema::of_type(const JsonReader& schema, const std::string& type) {
  if (type == "string") return string_of(schema);
  if (type == "integer") return integer_of(schema);
  if (type == "number") return number_of(schema);
  if (type == "boolean") return json_.boolean();
  if (type == "null") return json_.null();
  return type == "array" ? array_of(schema) : object_of(schema);
}

// The grammar part of the schema that a $ref names: "#", or a JSON pointer into the document, such as "#/a/b". In a
// JSON pointer "~0" is '~' and "~1" is '/'.
JsonSchema::PartId JsonSchema::resolve_reference(const JsonReader& reference) {
  const auto pointer = reference.as_string();
  if (const auto known = references_.find(pointer); known != references_.end()) return known->second;
  if (references_.size() > kMostReferences) reference.fail(fmt::format("at most {} references", kMostReferences));
  if (!pointer.starts_with("#/")) reference.fail("a place in this schema, as \"#/$defs/NAME\"");
  auto at = document_;
  for (size_t begin = 2; begin <= pointer.size();) {
    const size_t end = std::min(pointer.find('/', begin), pointer.size());
    std::string key;
    for (size_t i = begin; i < end; ++i) {
      const bool escaped = pointer[i] == '~' && i + 1 < end && (pointer[i + 1] == '0' || pointer[i + 1] == '1');
      key += escaped ? (pointer[++i] == '0' ? '~' : '/') : pointer[i];
    }
    const auto index = at.is_array() ? parse_number<size_t>(key) : std::nullopt;
    const auto items = at.is_array() ? at.items() : std::vector<JsonReader>{};
    if (at.is_object() && at.find(key)) {
      at = *at.find(key);
    } else if (index && *index < items.size()) {
      at = items[*index];
    } else {
      reference.fail("a place that exists in this schema");
    }
    begin = end + 1;
  }
  const auto part = build_.forward();
  references_[pointer] = part;
  build_.define(part, part_of(at));
  return part;
}

// The values of enum or const that have one of the types and satisfy lengths and bounds. Other values are left out; it
// is an error when no value remains.
JsonSchema::PartId JsonSchema::literals(const JsonReader& schema, const std::vector<Json>& values) {
  const auto types = schema.has("type") ? types_of(schema) : std::vector<std::string>{};
  std::vector<std::string> texts;
  for (const auto& value : values) {
    const bool fits =
        types.empty() || std::ranges::any_of(types, [&](const auto& type) { return is_of_type(value, type); });
    if (!fits || !is_within_bounds(schema, value)) continue;
    texts.push_back(dump_json(value));
    literal_bytes_ += static_cast<int64_t>(texts.back().size());
    if (literal_bytes_ > kMostLiteralBytes) schema.fail(fmt::format("values of at most {} bytes", kMostLiteralBytes));
  }
  if (texts.empty()) schema.fail("a value that the type takes, within the lengths and bounds");
  return json_.one_of(texts);
}

JsonSchema::PartId JsonSchema::string_of(const JsonReader& schema) {
  if (const auto format = schema.find("format")) {
    check_no_other_keys(schema, "format", {"type"});
    return format_of(*format);
  }
  const auto least = static_cast<int32_t>(schema.integer("minLength", 0, 0, kMostItems));
  if (!schema.has("maxLength")) return json_.string(least);
  return json_.string(least, static_cast<int32_t>(schema.integer("maxLength", 0, least, kMostItems)));
}

JsonSchema::PartId JsonSchema::format_of(const JsonReader& format) {
  const auto name = format.as_string();
  const auto digit = build_.range('0', '9');
  const auto number = [&](int64_t first, int64_t last) {  // two digits, from `first` to `last`
    std::vector<std::string> texts;
    for (int64_t each = first; each <= last; ++each) texts.push_back(fmt::format("{:02}", each));
    return json_.one_of(texts);
  };
  const auto dash = build_.literal("-"), colon = build_.literal(":");
  // MM-DD: days 1 to 28 of every month, days 29 and 30 of all but February, day 31 of the months that have one.
  const auto month_and_day = build_.choice(
      {build_.sequence({number(1, 12), dash, number(1, 28)}),
       build_.sequence({build_.choice({number(1, 1), number(3, 12)}), dash, number(29, 30)}),
       build_.sequence(
           {build_.choice({number(1, 1), number(3, 3), number(5, 5), number(7, 8), number(10, 10), number(12, 12)}),
            dash, number(31, 31)})});
  std::vector<PartId> years;  // 0001 to 9999
  for (int32_t zeros = 0; zeros < 4; ++zeros) {
    years.push_back(build_.sequence({build_.literal(std::string(static_cast<size_t>(zeros), '0')),
                                     build_.range('1', '9'), build_.repeat(digit, 3 - zeros, 3 - zeros)}));
  }
  // The year YYYY is a leap year if its last two digits are one of 04, 08, ..., 96, or if its first two digits are one
  // of these and the last two are 00.
  std::vector<std::string> fours;  // 04, 08, ..., 96
  for (int64_t each = 4; each < 100; each += 4) fours.push_back(fmt::format("{:02}", each));
  const auto four = json_.one_of(fours);
  const auto leap =
      build_.choice({build_.sequence({digit, digit, four}), build_.sequence({four, build_.literal("00")})});
  const auto date = build_.choice({build_.sequence({build_.choice(years), dash, month_and_day}),
                                   build_.sequence({leap, build_.literal("-02-29")})});
  const auto minutes = build_.sequence({number(0, 23), colon, number(0, 59)});
  const auto fraction = build_.optional(build_.sequence({build_.literal("."), build_.repeat(digit, 1, 9)}));
  const auto zone =
      build_.choice({build_.literal("Z"), build_.sequence({build_.choice({build_.literal("+"), dash}), minutes})});
  const auto time = build_.sequence({minutes, colon, number(0, 59), fraction, zone});
  if (name == "date") return json_.quoted(date);
  if (name == "time") return json_.quoted(time);
  if (name == "date-time") return json_.quoted(build_.sequence({date, build_.literal("T"), time}));
  if (name != "uuid") format.fail("date-time, date, time or uuid");
  const auto hex = build_.choice({digit, build_.range('a', 'f')});
  const auto hexes = [&](int32_t count) { return build_.repeat(hex, count, count); };
  return json_.quoted(build_.sequence({hexes(8), dash, hexes(4), dash, hexes(4), dash, hexes(4), dash, hexes(12)}));
}

// Bounds that are 64-bit integers are used exactly, because a double cannot represent all of them.
JsonSchema::PartId JsonSchema::integer_of(const JsonReader& schema) {
  constexpr int64_t kMaxInteger = JsonParts::kMaxInteger;
  // Reads the bound `key`; returns `missing` if the schema has no such key. A fractional bound is rounded to the next
  // integer inside the range. `shift` is added to an integer bound: it makes an exclusive bound inclusive. The result
  // is at least -kMaxInteger - 1 and at most kMaxInteger + 1.
  const auto bound = [&](const char* key, int64_t missing, double (*round)(double), int64_t shift) {
    const auto given = schema.find(key);
    if (!given) return missing;
    const double near = given->as_number(-1e30, 1e30);
    if (std::abs(near) > 2e18) return near < 0 ? -kMaxInteger - 1 : kMaxInteger + 1;
    const bool whole = given->value().is_number_integer();
    const auto value = whole ? given->value().get<int64_t>() : static_cast<int64_t>(round(near));
    const bool shifts = whole || static_cast<double>(value) == near;
    return std::clamp(value + (shifts ? shift : 0), -kMaxInteger - 1, kMaxInteger + 1);
  };
  const auto up = [](double value) { return std::ceil(value); };
  const auto down = [](double value) { return std::floor(value); };
  const auto least = std::max(bound("minimum", -kMaxInteger, up, 0), bound("exclusiveMinimum", -kMaxInteger, up, 1));
  const auto most = std::min(bound("maximum", kMaxInteger, down, 0), bound("exclusiveMaximum", kMaxInteger, down, -1));
  if (least > most || least > kMaxInteger || most < -kMaxInteger) schema.fail("bounds between which an integer lies");
  return json_.integer(std::max(least, -kMaxInteger), std::min(most, kMaxInteger));
}

JsonSchema::PartId JsonSchema::number_of(const JsonReader& schema) {
  const auto bound = [&](const char* closed, const char* open) -> std::optional<JsonParts::NumberBound> {
    std::optional<JsonParts::NumberBound> found;
    for (const char* key : {closed, open}) {
      const auto given = schema.find(key);
      if (!given) continue;
      const double value = given->as_number(-1e15, 1e15);
      if (value != std::floor(value)) given->fail("a whole number: other bounds of numbers are not supported");
      if (found) schema.fail(fmt::format("both {} and {}", closed, open), "one of them");
      found = {static_cast<int64_t>(value), key == open};
    }
    return found;
  };
  const auto least = bound("minimum", "exclusiveMinimum"), most = bound("maximum", "exclusiveMaximum");
  if (!least && !most) return json_.number();
  const bool empty =
      least && most && (least->value > most->value || (least->value == most->value && (least->open || most->open)));
  if (empty) schema.fail("bounds between which a number lies");
  return json_.number(least, most);
}

JsonSchema::PartId JsonSchema::array_of(const JsonReader& schema) {
  const auto items = schema.find("items"), first = schema.find("prefixItems");
  const auto least = static_cast<int32_t>(schema.integer("minItems", 0, 0, kMostItems));
  const auto most_items = schema.has("maxItems") ? schema.integer("maxItems", 0, least, kMostItems) : kMostItems + 1;
  std::vector<PartId> leading;
  if (first) {
    for (const auto& each : first->items()) leading.push_back(part_of(each));
  }
  const auto leading_count = static_cast<int64_t>(leading.size());
  const bool closed = items && items->value() == false;  // no items after those of prefixItems
  if (closed && least > leading_count) schema.fail(fmt::format("minItems {}", least), "as many as prefixItems at most");
  const auto most = std::min(most_items, closed ? leading_count : kMostItems + 1);
  if (most == 0) return json_.brackets(build_.literal(""));
  const auto other = closed ? build_.literal("") : items ? part_of(*items) : json_.any_value();
  // The grammar of the array is built from the last item to the first. Each of the first `head` items gets a grammar
  // part of its own: the item, followed by `tail`, the part of everything after this item. From index `least` on these
  // parts are optional. An item's part contains its tail, so an array can only lack its last items. All items after the
  // first `head` have the same schema and are one repetition.
  const int64_t head = std::min(std::max<int64_t>(leading_count, 1), most);
  const auto after = build_.sequence({json_.comma(), other});
  const auto tail_least = static_cast<int32_t>(std::max<int64_t>(least - head, 0));
  const auto tail_most = most > kMostItems ? -1 : static_cast<int32_t>(most - head);
  auto tail = tail_most < 0 ? build_.repeat(after, tail_least) : build_.repeat(after, tail_least, tail_most);
  for (int64_t i = head; i-- > 0;) {
    const auto item = i < leading_count ? leading[static_cast<size_t>(i)] : other;
    const auto here = build_.sequence({i == 0 ? build_.literal("") : json_.comma(), item, tail});
    tail = i < least ? here : build_.optional(here);
  }
  return json_.brackets(tail);
}

// Members of "properties" come in the order in which the schema lists them. Other keys are allowed when
// "additionalProperties" allows them, or when the schema names no property; a name in "required" that is not in
// "properties" is an error.
JsonSchema::PartId JsonSchema::object_of(const JsonReader& schema) {
  std::set<std::string> required;
  if (const auto list = schema.find("required")) {
    for (const auto& each : list->items()) required.insert(each.as_string());
  }
  std::vector<ObjectMember> members;
  std::vector<std::string> names;
  if (const auto properties = schema.find("properties")) {
    for (const auto& [name, property] : properties->members()) {
      if (name.size() > kLongestName) property.fail("a name of at most 512 bytes");
      const auto part = build_.sequence({json_.literal(name), json_.colon(), part_of(property)});
      members.push_back({part, required.erase(name) > 0});
      names.push_back(name);
    }
  }
  const auto more = schema.find("additionalProperties");
  const bool open = more ? more->value() != false : members.empty();
  if (!required.empty()) {
    schema.fail(fmt::format("the required name {}", quote(*required.begin())), "only names in properties");
  }
  if (!open) return json_.braces(members_of(members, {}));
  const auto value = more ? part_of(*more) : json_.any_value();
  const auto key = names.empty() ? json_.string() : json_.key_none_of(names);
  return json_.braces(members_of(members, {build_.sequence({key, json_.colon(), value})}));
}

// The grammar part inside the braces: `members` in order, then any number of `others`. It is built from the last member
// to the first. `tail` matches what follows an earlier member, so it begins with a comma unless it is empty; `start`
// matches the same members without this comma, for the case that no earlier member is present. The grammar grows
// linearly with the number of members.
JsonSchema::PartId JsonSchema::members_of(const std::vector<ObjectMember>& members, const std::vector<PartId>& others) {
  auto tail = build_.literal(""), start = tail;
  for (const auto other : others) {
    tail = build_.zero_or_more(build_.sequence({json_.comma(), other}));
    start = build_.optional(build_.sequence({other, tail}));
  }
  for (size_t i = members.size(); i-- > 0;) {
    const auto& [part, required] = members[i];
    const auto first = build_.sequence({part, tail});
    const auto later = build_.sequence({json_.comma(), part, tail});
    start = required ? first : build_.choice({first, start});
    tail = required ? later : build_.choice({later, tail});
  }
  return start;
}

}  // namespace tessera::text
