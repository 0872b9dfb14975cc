// The tokens of a vocabulary that have a text, in the order of their bytes.
//
//   const auto vocabulary = std::make_shared<const SortedVocabulary>(tokenizer);
//   for (const auto& token : vocabulary->tokens()) use(token.bytes, token.id);
//
// Special tokens have no text. Immutable.
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
    size_t shared;  // bytes that it begins with as the token before it does
  };
  const std::vector<Token>& tokens() const { return tokens_; }
  size_t size() const { return place_.size(); }  // of the vocabulary
  const std::string& bytes(int64_t id) const;    // "" of all others

 private:
  std::vector<Token> tokens_;
  std::vector<int32_t> place_;  // of an id in tokens_; -1
};

}  // namespace tessera::text
