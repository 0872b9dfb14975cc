// tokenizer.json as read: vocabulary and merges in flat form, everything else as checked JSON.
//
//   TokenizerFile file = parse_tokenizer_file(text, "dir/tokenizer.json");
//   JsonNode model = file.root().at("model");
//   bool fuse = model.boolean("fuse_unk", false);
//
// Every accessor raises Error kFormat that names the file, the path inside it, what was found and what was wanted.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::text {

class JsonNode {
 public:
  JsonNode(const nlohmann::json& value, std::string path) : value_(&value), path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  bool is_null() const;
  bool is_object() const;
  bool has(const char* key) const;       // present and not null; this must be an object
  JsonNode at(const char* key) const;    // Error when missing
  std::vector<JsonNode> items() const;   // of an array
  std::vector<std::pair<std::string, JsonNode>> members() const;  // of an object
  std::string as_string() const;
  uint64_t as_unsigned() const;
  std::string string(const char* key) const;
  std::string string(const char* key, std::string_view missing) const;
  bool boolean(const char* key, bool missing) const;
  bool boolean(const char* key) const;
  uint32_t character(const char* key) const;  // a string of exactly one character
  [[noreturn]] void fail(std::string_view found, std::string_view wanted) const;

 private:
  const nlohmann::json* value_;
  std::string path_;
};

struct TokenizerFile {
  TokenizerFile();
  ~TokenizerFile();
  TokenizerFile(TokenizerFile&&) noexcept;

  JsonNode root() const;

  std::string name;
  std::unique_ptr<nlohmann::json> json;  // without model.vocab and model.merges
  bool has_vocab = false;                // model.vocab was an object
  std::vector<std::pair<std::string, uint64_t>> vocab;
  std::vector<std::pair<std::string, std::string>> merges;
};

TokenizerFile parse_tokenizer_file(std::string_view text, std::string name);

}  // namespace tessera::text
