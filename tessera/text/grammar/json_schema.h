// A JSON Schema as a grammar of the texts that it takes.
//
//   GrammarBuilder build;
//   JsonParts json(build);
//   JsonSchema schema(json, JsonReader(document, "response_format"));
//   const auto grammar = std::move(build).finish(schema.value());
//
// Every text of the grammar is valid under the schema; not every valid text is one of the grammar: members come in the
// order in which `properties` names them, and others only where `additionalProperties` is given and allows them, or no
// property is named. Taken of drafts 7 to 2020-12: type, enum, const, anyOf, oneOf (read as anyOf), allOf of one, $ref
// inside the document, properties, required, additionalProperties, items, prefixItems, minItems, maxItems, minLength,
// maxLength, minimum, maximum, exclusiveMinimum and exclusiveMaximum (whole ones of numbers), and the formats
// date-time, date, time and uuid. What else would narrow a value is an error that names it: never ignored.
// Errors are those of the reader, of its kind, and so where the document is too large: over 10,000 schemas, 1,000
// references, 200 schemas inside one another, 1 MiB of values in enum and const; the grammar has a limit of its own. A
// key whose value is null counts as absent, but for "const". Integers in enum and const keep all their digits where the
// document was parsed with exact_numbers. One thread at a time.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/base/text/json.h"
#include "tessera/text/grammar/grammar.h"
#include "tessera/text/grammar/json_parts.h"

namespace tessera::text {

class JsonSchema {
 public:
  using Part = Grammar::Part;
  // Borrows the parts, and the document while parts are made. Several schemas of one grammar share the parts.
  JsonSchema(JsonParts& json, const JsonReader& document);

  Part value();

 private:
  struct Member {
    Part part;
    bool required;
  };
  Part part_of(const JsonReader& schema);
  Part read(const JsonReader& schema);
  Part of_type(const JsonReader& schema, const std::string& type);
  Part referred(const JsonReader& reference);
  Part literals(const JsonReader& schema, const std::vector<Json>& values);
  Part string_of(const JsonReader& schema);
  Part format_of(const JsonReader& format);
  Part integer_of(const JsonReader& schema);
  Part number_of(const JsonReader& schema);
  Part array_of(const JsonReader& schema);
  Part object_of(const JsonReader& schema);
  Part members_of(const std::vector<Member>& members, const std::vector<Part>& others);

  GrammarBuilder& build_;
  JsonReader document_;
  JsonParts& json_;
  std::map<std::string, Part> referred_;
  int64_t depth_ = 0, schemas_ = 0, literal_bytes_ = 0;
};

}  // namespace tessera::text
