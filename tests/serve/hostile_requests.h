// Requests whose schemas cost a server as much as a body of at most 4 MB can make them cost.
//
//   for (const auto& request : hostile_requests()) {
//     const auto reply = http(port, "POST", request.path, request.body.dump());   // 200, 400, 500 or 503
//   }
//
// A server may refuse such a request, end it with an error, or answer it. Meanwhile its memory must stay within the
// stated bounds, and it must answer the requests of other clients. Each body has "max_tokens", so that an answer ends.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {

struct HostileRequest {
  std::string name;
  std::string path;
  nlohmann::ordered_json body;
};

// An object with `count` named properties, whose names have `bytes` bytes. The object may also have any other key.
inline nlohmann::ordered_json schema_of_names(int count, int bytes) {
  nlohmann::ordered_json properties = nlohmann::ordered_json::object();
  for (int i = 0; i < count; ++i) {
    auto name = fmt::format("{:05}", i);
    // The names share only the digits, because the letters of each name differ.
    for (int at = 0; static_cast<int>(name.size()) < bytes; ++at) {
      name += static_cast<char>('a' + (i * 7 + at * 5) % 26);
    }
    properties.get_ref<nlohmann::ordered_json::object_t&>().push_back({std::move(name), true});
  }
  return {{"type", "object"}, {"properties", std::move(properties)}, {"additionalProperties", true}};
}

// Strings of exactly k characters for each k up to `count`. A character may belong to any of these strings.
inline nlohmann::ordered_json schema_of_lengths(int count) {
  auto ways = nlohmann::ordered_json::array();
  for (int k = 1; k <= count; ++k) ways.push_back({{"type", "string"}, {"minLength", k}, {"maxLength", k}});
  return {{"anyOf", std::move(ways)}};
}

// Arrays of `count` types, with up to `most` items each. The texts of all types begin in the same way.
inline nlohmann::ordered_json schema_of_arrays(int count, int most) {
  auto ways = nlohmann::ordered_json::array();
  for (int k = 1; k <= count; ++k) {
    ways.push_back({{"type", "array"}, {"items", {{"type", "string"}, {"maxLength", k}}}, {"maxItems", most - k % 7}});
  }
  return {{"anyOf", std::move(ways)}};
}

// `count` strings that differ only in their ends: "aaa...0", "aaa...1" and so on.
inline nlohmann::ordered_json schema_of_values(int count, int bytes) {
  auto values = nlohmann::ordered_json::array();
  for (int i = 0; i < count; ++i) values.push_back(std::string(static_cast<size_t>(bytes), 'a') + std::to_string(i));
  return {{"enum", std::move(values)}};
}

// Nested schemas with two alternatives at each level. The beginning of a text may belong to both alternatives.
inline nlohmann::ordered_json schema_of_readings(int depth) {
  nlohmann::ordered_json schema = {{"type", "array"}};
  for (int i = 0; i < depth; ++i) {
    schema = {
        {"anyOf", {{{"type", "array"}, {"items", schema}}, {{"type", "array"}, {"items", {{"type", "integer"}}}}}}};
  }
  return schema;
}

// A chain of references in which each one refers to the next one twice: 2^depth ways to reach the same position.
inline nlohmann::ordered_json schema_of_references(int depth) {
  nlohmann::ordered_json places = nlohmann::ordered_json::object();
  for (int i = 0; i < depth; ++i) {
    const nlohmann::ordered_json next = {{"$ref", fmt::format("#/$defs/p{}", i + 1)}};
    places[fmt::format("p{}", i)] = {
        {"type", "array"}, {"prefixItems", {{{"anyOf", {next, {{"type", "array"}, {"items", next}}}}}, next}}};
  }
  places[fmt::format("p{}", depth)] = {{"type", {"string", "array"}}};
  return {{"$ref", "#/$defs/p0"}, {"$defs", std::move(places)}};
}

// An object of `keys` members inside `depth` nested objects.
inline nlohmann::ordered_json schema_of_depth(int depth, int keys) {
  nlohmann::ordered_json properties = nlohmann::ordered_json::object();
  for (int i = 0; i < keys; ++i) {
    properties.get_ref<nlohmann::ordered_json::object_t&>().push_back({std::to_string(i), true});
  }
  nlohmann::ordered_json inner = {{"type", "object"}, {"properties", std::move(properties)}};
  for (int i = 0; i < depth; ++i) {
    inner = {{"type", "object"}, {"properties", {{std::string(60, static_cast<char>('a' + i % 26)), inner}}}};
  }
  return inner;
}

inline std::vector<std::pair<std::string, nlohmann::ordered_json>> hostile_schemas() {
  return {{"names of 500 bytes", schema_of_names(7'500, 500)},
          {"names of 5 bytes", schema_of_names(9'000, 5)},
          {"lengths", schema_of_lengths(700)},
          {"few lengths", schema_of_lengths(60)},
          {"arrays", schema_of_arrays(600, 1'000'000)},
          {"values", schema_of_values(9'000, 100)},
          {"readings", schema_of_readings(28)},
          {"references", schema_of_references(60)},
          {"depth", schema_of_depth(20, 90'000)},
          {"a long string", {{"type", "string"}, {"minLength", 1'000'000}}},
          {"a long array", {{"type", "array"}, {"items", {{"type", "null"}}}, {"minItems", 1'000'000}}},
          {"no value", {{"$ref", "#"}}},
          {"no end", {{"type", "array"}, {"items", {{"$ref", "#"}}}, {"minItems", 1}}}};
}

// Each schema as the response format of a completion, as the response format of a chat, and as the parameters of a tool
// that must be called.
inline std::vector<HostileRequest> hostile_requests(int64_t max_tokens = 200) {
  std::vector<HostileRequest> requests;
  const nlohmann::ordered_json messages = {{{"role", "user"}, {"content", "hi"}}};
  for (const auto& [name, schema] : hostile_schemas()) {
    const nlohmann::ordered_json format = {{"type", "json_schema"},
                                           {"json_schema", {{"name", "answer"}, {"schema", schema}}}};
    const nlohmann::ordered_json tools = {
        {{"type", "function"}, {"function", {{"name", "f"}, {"parameters", schema}}}}};
    requests.push_back({name + ", completion",
                        "/v1/completions",
                        {{"prompt", "hi"}, {"max_tokens", max_tokens}, {"response_format", format}}});
    requests.push_back({name + ", several choices",
                        "/v1/chat/completions",
                        {{"messages", messages}, {"max_tokens", max_tokens}, {"n", 8}, {"response_format", format}}});
    requests.push_back({name + ", tool",
                        "/v1/chat/completions",
                        {{"messages", messages},
                         {"max_tokens", max_tokens},
                         {"tools", tools},
                         {"tool_choice", "required"},
                         {"stream", true}}});
  }
  return requests;
}

}  // namespace tessera::testing
