// Random JSON schemas, and is_valid(), which follows the text of the JSON Schema specification.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tessera/base/text/json.h"
#include "tessera/base/text/json_numbers.h"

namespace tessera::text {

inline Json drawn_schema_value(std::mt19937_64& draw) {
  const std::vector<Json> values = {nullptr,
                                    0,
                                    -7,
                                    2.5,
                                    3.0,
                                    "a",
                                    "x\"y",
                                    "",
                                    true,
                                    Json::array({nullptr, 1}),
                                    Json{{"a", nullptr}},
                                    exact_number("12345678901234567890123"),
                                    exact_number("-98765432109876543210"),
                                    exact_number("1e400"),
                                    Json::array({exact_number("36893488147419103232")}),
                                    18446744073709551615U};
  return values[draw() % values.size()];
}

inline Json drawn_subschema(std::mt19937_64& draw, int depth) {
  const auto one_in = [&](uint64_t count) { return draw() % count == 0; };
  const auto deeper = [&] { return drawn_subschema(draw, depth - 1); };
  Json schema = Json::object();
  switch (draw() % (depth > 0 ? 11 : 6)) {
    case 0:
      return {{"const", drawn_schema_value(draw)}};
    case 1:
      return one_in(2) ? Json{{"const", nullptr}, {"type", "null"}} : Json{{"const", nullptr}};
    case 2:
      schema["enum"] = Json::array();
      for (uint64_t left = 1 + draw() % 4; left > 0; --left) schema["enum"].push_back(drawn_schema_value(draw));
      return schema;
    case 3: {
      const int64_t least = static_cast<int64_t>(draw() % 2000) - 1000 + (one_in(2) ? int64_t{1} << 53 : 0);
      schema = {{"type", "integer"}};
      schema[one_in(2) ? "minimum" : "exclusiveMinimum"] = least;
      schema[one_in(2) ? "maximum" : "exclusiveMaximum"] = least + 2 + static_cast<int64_t>(draw() % 20);
      return schema;
    }
    case 4:
      schema = {{"type", "string"}, {"minLength", draw() % 3}};
      if (one_in(2)) schema["maxLength"] = 3 + draw() % 3;
      return schema;
    case 5:
      return {{"type", Json::array({"null", one_in(2) ? "boolean" : "number"})}};
    case 6:
    case 7: {  // tuples, often closed by "items": false
      schema = {{"type", "array"}, {"prefixItems", Json::array()}};
      const uint64_t leading = draw() % 4;
      for (uint64_t i = 0; i < leading; ++i) schema["prefixItems"].push_back(deeper());
      if (one_in(2)) schema["minItems"] = draw() % (leading + 1);
      if (one_in(3)) schema["maxItems"] = leading + draw() % 2;
      if (!one_in(3)) schema["items"] = one_in(4) ? deeper() : Json(false);
      return schema;
    }
    case 8:
      schema = {{"type", "array"}, {"items", deeper()}, {"minItems", draw() % 3}};
      if (one_in(2)) schema["maxItems"] = 2 + draw() % 2;
      return schema;
    case 9:
      schema = {{"type", "object"}, {"properties", Json::object()}, {"required", Json::array()}};
      for (const char* name : {"a", "ab", "n\"m", "\u00e9"}) {
        if (one_in(2)) continue;
        schema["properties"][name] = deeper();
        if (one_in(2)) schema["required"].push_back(name);
      }
      if (one_in(2)) schema["additionalProperties"] = one_in(2) ? Json(false) : deeper();
      return schema;
    default:
      schema = {{"anyOf", Json::array({deeper(), deeper()})}};
      if (one_in(3)) schema["anyOf"].push_back({{"$ref", "#/$defs/endless"}});
      return schema;
  }
}

inline Json drawn_schema(std::mt19937_64& draw) {
  Json root = {{"type", "object"}, {"properties", {{"value", drawn_subschema(draw, 3)}}}, {"required", {"value"}}};
  root["$defs"]["endless"] = {{"type", "array"}, {"items", {{"$ref", "#/$defs/endless"}}}, {"minItems", 1}};
  return root;
}

inline bool is_valid_type(const Json& value, const std::string& type) {
  const auto digits = exact_digits(value);
  if (type == "number") return value.is_number() || digits;
  if (type == "integer") return value.is_number_integer() || (digits && is_integer_text(*digits));
  if (type == "null") return value.is_null();
  if (type == "boolean") return value.is_boolean();
  if (type == "string") return value.is_string();
  return type == "array" ? value.is_array() : value.is_object();
}

inline bool is_valid(const Json& value, const Json& schema, const Json& root) {
  const auto valid = [&](const Json& part, const Json& under) { return is_valid(part, under, root); };
  if (schema.is_boolean()) return schema.get<bool>();
  if (schema.contains("$ref")) return valid(value, root["$defs"]["endless"]);
  if (schema.contains("const") && value != schema["const"]) return false;
  if (schema.contains("enum")) {
    const auto& values = schema["enum"];
    if (std::ranges::find(values, value) == values.end()) return false;
  }
  if (schema.contains("anyOf")) {
    const auto& ways = schema["anyOf"];
    return std::ranges::any_of(ways, [&](const Json& way) { return valid(value, way); });
  }
  if (schema.contains("type")) {
    const auto types = schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]});
    if (std::ranges::none_of(types, [&](const Json& type) { return is_valid_type(value, type); })) return false;
  }
  if (value.is_number_integer()) {
    const auto number = value.get<int64_t>();
    if (schema.contains("minimum") && number < schema["minimum"].get<int64_t>()) return false;
    if (schema.contains("exclusiveMinimum") && number <= schema["exclusiveMinimum"].get<int64_t>()) return false;
    if (schema.contains("maximum") && number > schema["maximum"].get<int64_t>()) return false;
    if (schema.contains("exclusiveMaximum") && number >= schema["exclusiveMaximum"].get<int64_t>()) return false;
  }
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    const auto length = static_cast<size_t>(
        std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
    if (length < schema.value("minLength", size_t{0})) return false;
    if (schema.contains("maxLength") && length > schema["maxLength"].get<size_t>()) return false;
  }
  if (value.is_array()) {
    if (value.size() < schema.value("minItems", size_t{0})) return false;
    if (schema.contains("maxItems") && value.size() > schema["maxItems"].get<size_t>()) return false;
    const auto leading = schema.contains("prefixItems") ? schema["prefixItems"] : Json::array();
    for (size_t i = 0; i < value.size(); ++i) {
      if (i < leading.size() ? !valid(value[i], leading[i])
                             : schema.contains("items") && !valid(value[i], schema["items"])) {
        return false;
      }
    }
  }
  if (value.is_object()) {
    for (const auto& name : schema.contains("required") ? schema["required"] : Json::array()) {
      if (!value.contains(name.get<std::string>())) return false;
    }
    for (const auto& [name, member] : value.items()) {
      const bool named = schema.contains("properties") && schema["properties"].contains(name);
      if (named && !valid(member, schema["properties"][name])) return false;
      if (!named && schema.contains("additionalProperties") && !valid(member, schema["additionalProperties"])) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace tessera::text
