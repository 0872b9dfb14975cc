// Constrained decoding: says which tokens may come next in one sequence, so that the whole answer is a text of a
// grammar.
//
//   const auto vocabulary = std::make_shared<const SortedVocabulary>(tokenizer);            // once
//   const auto masks = std::make_shared<GrammarMasks>(grammar, vocabulary);                 // once per grammar
//   TokenConstraint constraint(masks, stop_tokens);                                         // once per sequence
//   const auto allowed = constraint.allowed(generated_tokens);                              // by token id
//   if (constraint.complete(generated_tokens)) ...                                          // no token may follow
//
// Stop tokens are allowed when the generated text is a complete text of the grammar. The time that allowed() takes
// depends on the grammar. A server therefore does the work with several calls of prepare_allowed_tokens() and few steps
// in each, so that other sequences do not wait. Not thread-safe.
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
      : masks_(std::move(masks)), cursor_(*masks_), stop_tokens_(std::move(stop_tokens)) {}

  // Does at most about `steps` steps of the work for allowed(generated_tokens) or complete(generated_tokens). Returns
  // true when the work is done; the call of allowed or complete then takes no time. Raises the errors of
  // GrammarMasks::advance_and_mask.
  bool prepare_allowed_tokens(std::span<const int64_t> generated_tokens, uint64_t steps);
  bool prepare_complete(std::span<const int64_t> generated_tokens, uint64_t steps);

  // `generated_tokens` are the tokens generated since the prompt. allowed() returns the tokens that may come next, by
  // token id, and raises Error kConfig when there is none. complete() is true when the generated text is a complete
  // text of the grammar and no byte may follow.
  TokenMask allowed(std::span<const int64_t> generated_tokens);
  bool complete(std::span<const int64_t> generated_tokens);

 private:
  struct Prepared {
    size_t tokens;
    GrammarMasks::MaskResult answer;
  };
  bool prepare(std::span<const int64_t> generated_tokens, GrammarMasks::ResultKind result_kind, uint64_t steps);

  std::shared_ptr<GrammarMasks> masks_;
  GrammarMasks::GrammarCursor cursor_;
  std::vector<int64_t> stop_tokens_;
  std::optional<Prepared> prepared_;
};

}  // namespace tessera::text
