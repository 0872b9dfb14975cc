// Which tokens may come next, so that the text of a whole answer is one that a grammar wants.
//
//   const auto vocabulary = std::make_shared<const SortedVocabulary>(tokenizer);            // once
//   const auto masks = std::make_shared<GrammarMasks>(grammar, vocabulary);                 // of all its sequences
//   TokenConstraint constraint(masks, stop_tokens);                                         // of one
//   const auto allowed = constraint.allowed(made);                                          // by token id
//   if (constraint.complete(made)) ...                                                      // no token may follow
//
// Tokens are what their bytes are; special tokens are none, but that stop tokens may come where the text is whole.
// GrammarMasks may be used from many threads at once; a TokenConstraint is its sequence's.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/text/grammar/grammar.h"
#include "tessera/text/tokenizer.h"

namespace tessera::text {

// The tokens that have a text, in the order of their bytes.
class SortedVocabulary {
 public:
  explicit SortedVocabulary(const Tokenizer& tokenizer);

  struct Token {
    std::string bytes;
    TokenId id;
    size_t shared;  // bytes that it begins with as the token before it does
  };
  const std::vector<Token>& tokens() const { return tokens_; }
  size_t size() const { return size_; }        // of the vocabulary
  const std::string& bytes(int64_t id) const;  // "" of all others

 private:
  std::vector<Token> tokens_;
  std::vector<int32_t> place_;  // of an id in tokens_; -1
  size_t size_;
};

using TokenMask = std::vector<bool>;

class GrammarMasks {
 public:
  GrammarMasks(Grammar grammar, std::shared_ptr<const SortedVocabulary> vocabulary);

  // How far a sequence is. What is kept is let go from time to time; a place of before then is found again.
  struct Place {
    int32_t state = 0;
    size_t tokens = 0;  // that led there
    uint64_t epoch = 0;
  };
  struct Answer {
    std::shared_ptr<const TokenMask> mask;  // of tokens with a text
    bool accepts = false, ends = false;     // the text is whole; and nothing may follow
  };
  // Moves the place behind these tokens. Error kConfig for tokens that the grammar does not take.
  Answer look(Place& place, std::span<const int64_t> made, bool with_mask);

 private:
  void forget();
  std::shared_ptr<const TokenMask> mask_of(int32_t state);

  const Grammar grammar_;
  const std::shared_ptr<const SortedVocabulary> vocabulary_;
  std::mutex mutex_;
  std::unique_ptr<GrammarStates> states_;
  std::unordered_map<int32_t, std::shared_ptr<const TokenMask>> masks_;
  uint64_t epoch_ = 1;  // no fresh place is of this one
};

class TokenConstraint {
 public:
  TokenConstraint(std::shared_ptr<GrammarMasks> masks, std::vector<int64_t> stop_tokens)
      : masks_(std::move(masks)), stop_tokens_(std::move(stop_tokens)) {}

  // After the tokens that were made since the prompt. Error kConfig where no token may come.
  TokenMask allowed(std::span<const int64_t> made);
  bool complete(std::span<const int64_t> made);

 private:
  std::shared_ptr<GrammarMasks> masks_;
  std::vector<int64_t> stop_tokens_;
  GrammarMasks::Place place_;
};

}  // namespace tessera::text
