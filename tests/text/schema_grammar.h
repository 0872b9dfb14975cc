// Makes grammars for tests, from a builder function or from the text of a JSON schema.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "tessera/base/text/json.h"
#include "tessera/text/grammar/json_schema.h"

namespace tessera::text {

inline Grammar grammar_of(const std::function<Grammar::PartId(GrammarBuilder&)>& make) {
  GrammarBuilder build;
  const auto root = make(build);
  return std::move(build).finish(root);
}

inline Grammar schema_grammar(const std::string& text) {
  const Json document = parse_json(text, "schema", {.exact_numbers = true});
  return grammar_of([&](auto& build) {
    JsonParts json(build);
    return JsonSchema(json, JsonReader(document, "schema")).value();
  });
}

}  // namespace tessera::text
