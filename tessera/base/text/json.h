// Parsing and reading untrusted JSON: a parser with limits and a reader that checks types and ranges.
//
//   const Json config = parse_json_object(read_file(path), "[models.config] " + path.string());
//   const JsonReader top(config, "[models.config] " + path.string(), ErrorKind::kConfig);
//   const int64_t heads = top.integer("num_attention_heads", 32, 1, 4096);
//   const std::string kind = top.at("rope_scaling").string("rope_type", "default");
//
// Parsing takes time and memory linear in the text (n log n in the keys of one object), because depth, bytes and keys
// are limited. If a key occurs twice, the last value counts, at the position of the first, as in Python. An error names
// `where`, the path inside the document, and the found and the wanted value, in one line. A Json is a plain value; a
// JsonReader refers to a Json that must outlive it. Const objects are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera {

using Json = nlohmann::ordered_json;

struct JsonLimits {
  size_t max_bytes = size_t{16} << 20;
  size_t max_depth = 64;        // nesting levels of arrays and objects
  size_t max_keys = 1'000'000;  // total of all objects
  // true: numbers beyond 64 bits or beyond the range of a double keep their digits (json_numbers.h). false: such an
  // integer becomes the nearest double, and a number beyond the range of a double is an error.
  bool exact_numbers = false;
};

// Parses JSON. Error kFormat for text that is not JSON, "WHERE: byte N: ...", and for text that exceeds a limit of
// JsonLimits, "WHERE: ..." without a byte position. WHERE is `where`.
Json parse_json(std::string_view text, const std::string& where, const JsonLimits& limits = {});
// parse_json(), and Error kFormat for JSON that is not an object.
Json parse_json_object(std::string_view text, const std::string& where, const JsonLimits& limits = {});

// The position at which a text stops being JSON, for readers that report line and column.
struct JsonSyntaxError {
  size_t byte = 0;  // counted from 1: the last byte that was read
  std::string reason;
};
// Returns the first syntax error in `text`; nullopt for valid JSON. Depth and size of the JSON are not limited. Builds
// no values.
std::optional<JsonSyntaxError> find_json_syntax_error(std::string_view text);

// A value's text for a message: "null", "an array of 3 values", "7", "\"text\"" (escaped, and cut when long).
std::string describe(const Json& value);

// A value of a document, with its path for messages.
class JsonReader {
 public:
  // `kind` is the kind of all errors of this reader.
  JsonReader(const Json& value, std::string where, ErrorKind kind = ErrorKind::kFormat);

  const Json& value() const { return *value_; }
  std::string name() const;  // "WHERE: model.vocab"
  bool is_null() const;
  bool is_object() const;
  bool is_array() const;
  [[noreturn]] void fail(std::string_view found, std::string_view expected) const;
  [[noreturn]] void fail(std::string_view expected) const;  // the message shows this value as found

  // The value itself. Error when the value has another type or is out of range.
  std::string as_string() const;
  bool as_boolean() const;
  int64_t as_integer(int64_t min_value, int64_t max_value) const;
  uint64_t as_unsigned() const;
  double as_number(double min_value, double max_value) const;
  std::vector<JsonReader> items() const;
  std::vector<std::pair<std::string, JsonReader>> members() const;

  // Members of this object. A null counts as absent, as in transformers. `default_value` is the result for an absent
  // member; without `default_value` an absent member is an Error.
  bool has(std::string_view key) const;
  JsonReader at(std::string_view key) const;  // a null is returned as a value
  // member() returns nullopt when the key is absent, and a null as a value. find() returns nullopt for a null, too.
  std::optional<JsonReader> member(std::string_view key) const;
  std::optional<JsonReader> find(std::string_view key) const;
  std::string string(std::string_view key, std::optional<std::string_view> default_value = std::nullopt) const;
  bool boolean(std::string_view key, std::optional<bool> default_value = std::nullopt) const;
  int64_t integer(std::string_view key, std::optional<int64_t> default_value, int64_t min_value,
                  int64_t max_value) const;
  double number(std::string_view key, std::optional<double> default_value, double min_value, double max_value) const;
  // One integer or a list of integers; empty when absent.
  std::vector<int64_t> integers(std::string_view key, int64_t min_value, int64_t max_value) const;

 private:
  // `where` and the kind of errors, which all readers of a document share.
  struct Origin {
    std::string where;
    ErrorKind kind;
  };
  // The key or index of a value in its parent, and a pointer to the ParentLink of the parent. The readers of siblings
  // share the ParentLink of their parent, so making a reader takes the same time and memory at every depth.
  struct ParentLink {
    std::shared_ptr<const ParentLink> parent;  // the parent's own link; null for the document itself
    std::string_view key;                      // points into the document
    size_t index;
    bool is_index;
  };
  JsonReader(const Json& value, const JsonReader& around, ParentLink link);
  JsonReader child(std::string_view key, const Json& value) const;
  std::string path() const;
  std::string path_of(std::string_view key) const;
  const Json* value_of(std::string_view key, std::string_view* stored_key = nullptr) const;  // null: no such key
  JsonReader require(std::string_view key) const;  // Error when absent or null

  const Json* value_;
  std::shared_ptr<const Origin> origin_;
  std::shared_ptr<const ParentLink> link_;  // null: the document itself
};

// Builds a document from parser events, within limits. parse_json() uses it. A parser may also store a part of the
// document itself and pass only the other events (text/tokenizer/tokenizer_file.cc).
class JsonBuilder {
 public:
  JsonBuilder(Json& root, std::string where, const JsonLimits& limits);
  JsonBuilder(const JsonBuilder&) = delete;
  JsonBuilder& operator=(const JsonBuilder&) = delete;

  void value(Json value);
  void key(std::string& key);
  void open(Json container);  // an empty object or array
  void close();
  // For a part of the document that the parser stores without the JsonBuilder: enter() and leave() count a nesting
  // level of this part, and count_key() counts a key, so that the limits also apply to this part.
  void enter();
  void leave() { --depth_; }
  void count_key();
  [[noreturn]] void syntax_error(size_t byte, std::string_view reason) const;

 private:
  Json& append(Json value);

  Json& root_;
  std::string where_;
  JsonLimits limits_;
  std::vector<Json*> open_;
  std::string key_;
  size_t depth_ = 0;
  size_t keys_ = 0;
};

}  // namespace tessera
