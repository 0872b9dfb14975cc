// The tokens of a vocabulary, sorted by their bytes. Special tokens have no bytes here and are left out.
//
//   const auto vocabulary = std::make_shared<const SortedVocabulary>(tokenizer);
//   for (const auto& token : vocabulary->tokens()) use(token.bytes, token.id);
//
// Immutable.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/text/tokenizer.h"

namespace tessera::text {

class SortedVocabulary {
 public:
  explicit SortedVocabulary(const Tokenizer& tokenizer);

  struct Token {
    std::string bytes;
    TokenId id;
    size_t common_prefix_bytes;  // shared with the token before this one
  };
  const std::vector<Token>& tokens() const { return tokens_; }
  size_t size() const { return index_of_id_.size(); }  // number of ids of the whole vocabulary
  const std::string& bytes(int64_t id) const;          // "" for a special token, and for an id without token or bytes

 private:
  std::vector<Token> tokens_;
  std::vector<int32_t> index_of_id_;  // by id: the index in tokens_, or -1
};

}  // namespace tessera::text
