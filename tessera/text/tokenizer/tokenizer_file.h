// The parsed tokenizer.json: the vocabulary and the merges as vectors, all other content as checked JSON.
//
//   TokenizerFile file = parse_tokenizer_file(text, "dir/tokenizer.json");
//   JsonReader model = file.root().at("model");
//   bool fuse = model.boolean("fuse_unk", false);
//
// Error kFormat for a text that is not a JSON object or exceeds the limits (1 GiB, 64 levels, 16 million keys).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/text/json.h"

namespace tessera::text {

// The code point of member `key` of `object`, which must be a string of exactly one character.
uint32_t character_of(const JsonReader& object, std::string_view key);

struct TokenizerFile {
  TokenizerFile() = default;
  TokenizerFile(TokenizerFile&&) = default;  // move-only, because the object is as large as the file
  JsonReader root() const;

  std::string name;
  std::shared_ptr<Json> json;  // without model.vocab and model.merges
  bool has_vocab = false;      // model.vocab is an object
  std::vector<std::pair<std::string, uint64_t>> vocab;
  std::vector<std::pair<std::string, std::string>> merges;
};

TokenizerFile parse_tokenizer_file(std::string_view text, std::string name);

}  // namespace tessera::text
