// JSON that nobody vouches for: one bounded parse and one checked reader.
//
//   const Json config = parse_json_object(read_file(path), "[models.config] " + path.string());
//   const JsonReader top(config, "[models.config] " + path.string(), ErrorKind::kConfig);
//   const int64_t heads = top.integer("num_attention_heads", 32, 1, 4096);
//   const std::string kind = top.at("rope_scaling").string("rope_type", "default");
//
// Parsing takes time and memory linear in the text (n log n in the keys of one object), whatever the text holds: depth,
// bytes and keys are limited. Of a key that is there twice the last value counts, in the first one's place, as in
// Python. Errors name `where`, the path inside the document, what was found and what was wanted, in one line. A Json is
// a plain value; a JsonReader borrows one. Thread-safe as const objects are.
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
  size_t max_depth = 64;        // of arrays and objects inside each other
  size_t max_keys = 1'000'000;  // of all objects together
  // Numbers that neither 64 bits nor a double hold keep their digits (json_numbers.h). Otherwise such an integer
  // becomes the nearest double, and a number that overflows a double is an error.
  bool exact_numbers = false;
};

// Error kFormat "WHERE: byte N: ..." for text that is no JSON or outgrows a limit.
Json parse_json(std::string_view text, const std::string& where, const JsonLimits& limits = {});
// Also for JSON that is no object.
Json parse_json_object(std::string_view text, const std::string& where, const JsonLimits& limits = {});

// Where a text stops being JSON, for readers that name a line and a column.
struct JsonFault {
  size_t byte = 0;  // from 1: the last one that was read
  std::string reason;
};
// Nothing for JSON, however deep or large. Builds nothing.
std::optional<JsonFault> find_json_fault(std::string_view text);

// A value in a message: "null", "an array of 3 values", "7", "\"text\"" (escaped and cut).
std::string describe(const Json& value);

// A value of a document with its path.
class JsonReader {
 public:
  // `kind` is that of the errors.
  JsonReader(const Json& value, std::string where, ErrorKind kind = ErrorKind::kFormat);

  const Json& value() const { return *value_; }
  std::string name() const;  // "WHERE: model.vocab"
  bool is_null() const;
  bool is_object() const;
  bool is_array() const;
  [[noreturn]] void fail(std::string_view found, std::string_view wanted) const;
  [[noreturn]] void fail(std::string_view wanted) const;  // found is this value

  // The value itself; an Error where its type is another.
  std::string as_string() const;
  bool as_boolean() const;
  int64_t as_integer(int64_t least, int64_t most) const;
  uint64_t as_unsigned() const;
  double as_number(double least, double most) const;
  std::vector<JsonReader> items() const;
  std::vector<std::pair<std::string, JsonReader>> members() const;

  // Members of this object. A null counts as absent, as in transformers; `missing` is what an absent one stands for,
  // without it an absent one is an Error.
  bool has(std::string_view key) const;
  JsonReader at(std::string_view key) const;  // a null is given, too
  std::optional<JsonReader> member(
      std::string_view key) const;  // a null is given, too; nothing where the key is absent
  std::optional<JsonReader> find(std::string_view key) const;
  std::string string(std::string_view key, std::optional<std::string_view> missing = std::nullopt) const;
  bool boolean(std::string_view key, std::optional<bool> missing = std::nullopt) const;
  int64_t integer(std::string_view key, std::optional<int64_t> missing, int64_t least, int64_t most) const;
  double number(std::string_view key, std::optional<double> missing, double least, double most) const;
  // One integer or a list of them; empty when absent.
  std::vector<int64_t> integers(std::string_view key, int64_t least, int64_t most) const;

 private:
  // Of the whole document.
  struct Origin {
    std::string where;
    ErrorKind kind;
  };
  // The key or the index of a value in the value around it. Readers of siblings share the places around them, so that
  // a reader costs the same however deep its value lies.
  struct Place {
    std::shared_ptr<const Place> around;  // null in the document itself
    std::string_view key;                 // of the document
    size_t index;
    bool is_index;
  };
  JsonReader(const Json& value, const JsonReader& around, Place place);
  JsonReader of_key(std::string_view key, const Json& value) const;
  std::string path() const;
  std::string path_of(std::string_view key) const;
  const Json* value_of(std::string_view key, std::string_view* stored_key = nullptr) const;  // null: no such key
  JsonReader present(std::string_view key) const;  // Error when absent or null

  const Json* value_;
  std::shared_ptr<const Origin> origin_;
  std::shared_ptr<const Place> place_;  // null: the document
};

// Builds a document from the events of a parser, within limits: what parse_json does, for parsers that keep a part of
// the document elsewhere.
class JsonBuilder {
 public:
  JsonBuilder(Json& root, std::string where, const JsonLimits& limits);
  JsonBuilder(const JsonBuilder&) = delete;
  JsonBuilder& operator=(const JsonBuilder&) = delete;

  void value(Json value);
  void key(std::string& key);
  void open(Json container);  // an empty object or array
  void close();
  // Counts a level, or a key, of a part that is kept elsewhere.
  void enter();
  void leave() { --depth_; }
  void count_key();
  [[noreturn]] void syntax_error(size_t byte, std::string_view reason) const;

 private:
  Json& place(Json value);

  Json& root_;
  std::string where_;
  JsonLimits limits_;
  std::vector<Json*> open_;
  std::string key_;
  size_t depth_ = 0;
  size_t keys_ = 0;
};

}  // namespace tessera
