// Converts a JSON Schema to a grammar of valid JSON texts.
//
//   GrammarBuilder build;
//   JsonParts json(build);
//   JsonSchema schema(json, JsonReader(document, "response_format"));
//   const auto grammar = std::move(build).finish(schema.value());
//
// Every text of the grammar is valid under the schema, but not every valid text is in the grammar: members come in the
// order of `properties`. Members that are not in `properties` come only if `additionalProperties` is present and allows
// them, or if the schema names no property.
// Supported keywords of drafts 7 to 2020-12: type, enum, const, anyOf, oneOf (read as anyOf), allOf of one schema, $ref
// inside the document, properties, required, additionalProperties, items, prefixItems, minItems, maxItems, minLength,
// maxLength, minimum, maximum, exclusiveMinimum and exclusiveMaximum (only integers as bounds of numbers), and the
// formats date-time, date, time and uuid. Any other keyword that restricts a value is an error that names the keyword.
// A key whose value is null counts as absent, except for "const". Integers in enum and const keep all digits when the
// document was parsed with exact_numbers.
// Errors have the kind of the reader. Limits, each also an error: 10,000 schemas, 1,000 references, 200 levels of
// schemas inside each other, 1 MiB of values in enum and const. The grammar has its own limit. Not thread-safe.
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
  using PartId = Grammar::PartId;
  // `document` is the JSON Schema; it must exist until value() returns. `json` makes the grammar parts of JSON values;
  // it must outlive this object. Several schemas of one grammar may share `json`.
  JsonSchema(JsonParts& json, const JsonReader& document);

  PartId value();  // the part of all values that the schema allows

 private:
  struct ObjectMember {
    PartId part;
    bool required;
  };
  PartId part_of(const JsonReader& schema);
  PartId read(const JsonReader& schema);
  PartId of_type(const JsonReader& schema, const std::string& type);
  PartId resolve_reference(const JsonReader& reference);
  PartId literals(const JsonReader& schema, const std::vector<Json>& values);
  PartId string_of(const JsonReader& schema);
  PartId format_of(const JsonReader& format);
  PartId integer_of(const JsonReader& schema);
  PartId number_of(const JsonReader& schema);
  PartId array_of(const JsonReader& schema);
  PartId object_of(const JsonReader& schema);
  PartId members_of(const std::vector<ObjectMember>& members, const std::vector<PartId>& others);

  GrammarBuilder& build_;
  JsonReader document_;
  JsonParts& json_;
  std::map<std::string, PartId> references_;  // the parts of $ref, by JSON pointer
  int64_t depth_ = 0, schemas_ = 0, literal_bytes_ = 0;
};

}  // namespace tessera::text
