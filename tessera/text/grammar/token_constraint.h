// Which tokens may come next in one sequence, so that the text of a whole answer is one that a grammar wants.
//
//   const auto vocabulary = std::make_shared<const SortedVocabulary>(tokenizer);            // once
//   const auto masks = std::make_shared<GrammarMasks>(grammar, vocabulary);                 // of all its sequences
//   TokenConstraint constraint(masks, stop_tokens);                                         // of one
//   const auto allowed = constraint.allowed(made);                                          // by token id
//   if (constraint.complete(made)) ...                                                      // no token may follow
//
// Stop tokens may come where the text is whole. What an answer costs depends on the grammar: who serves others
// meanwhile prepares it in slices. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tessera/text/grammar/grammar_masks.h"

namespace tessera::text {

class TokenConstraint {
 public:
  TokenConstraint(std::shared_ptr<GrammarMasks> masks, std::vector<int64_t> stop_tokens)
      : masks_(std::move(masks)), search_(*masks_), stop_tokens_(std::move(stop_tokens)) {}

  // At most about so many steps of the work for allowed(made), and for complete(made). False where it takes more: once
  // it is true, the call costs nothing. Errors of GrammarMasks::look.
  bool prepare_allowed(std::span<const int64_t> made, uint64_t steps);
  bool prepare_complete(std::span<const int64_t> made, uint64_t steps);

  // After the tokens that were made since the prompt. Error kConfig where no token may come.
  TokenMask allowed(std::span<const int64_t> made);
  bool complete(std::span<const int64_t> made);

 private:
  struct Prepared {
    size_t tokens;
    GrammarMasks::Answer answer;
  };
  bool prepare(std::span<const int64_t> made, GrammarMasks::Wanted wanted, uint64_t steps);

  std::shared_ptr<GrammarMasks> masks_;
  GrammarMasks::Search search_;
  std::vector<int64_t> stop_tokens_;
  std::optional<Prepared> prepared_;
};

}  // namespace tessera::text
