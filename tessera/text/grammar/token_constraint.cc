#include "tessera/text/grammar/token_constraint.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::text {
namespace {

constexpr uint64_t kSliceSteps = 200'000;  // steps between two checks of the memory limit

}  // namespace

// The result of an earlier call is used again if `generated_tokens` has the same number of tokens as in that call. The
// caller does not change the sequence between a prepare_ function and allowed() or complete(), so the tokens are the
// same, too.
bool TokenConstraint::prepare(std::span<const int64_t> generated_tokens, GrammarMasks::ResultKind result_kind,
                              uint64_t steps) {
  const bool mask = result_kind == GrammarMasks::ResultKind::kMask;
  if (prepared_ && prepared_->tokens == generated_tokens.size() && (prepared_->answer.mask || !mask)) return true;
  prepared_.reset();
  auto answer = masks_->advance_and_mask(cursor_, generated_tokens, result_kind, steps);
  if (!answer) return false;
  prepared_ = Prepared{generated_tokens.size(), std::move(*answer)};
  return true;
}

bool TokenConstraint::prepare_allowed_tokens(std::span<const int64_t> generated_tokens, uint64_t steps) {
  return prepare(generated_tokens, GrammarMasks::ResultKind::kMask, steps);
}

bool TokenConstraint::prepare_complete(std::span<const int64_t> generated_tokens, uint64_t steps) {
  return prepare(generated_tokens, GrammarMasks::ResultKind::kPlace, steps);
}

TokenMask TokenConstraint::allowed(std::span<const int64_t> generated_tokens) {
  while (!prepare_allowed_tokens(generated_tokens, kSliceSteps)) {
  }
  const auto answer = std::exchange(prepared_, std::nullopt)->answer;
  auto mask = *answer.mask;
  for (const int64_t token : stop_tokens_) {
    if (token >= 0 && static_cast<size_t>(token) < mask.size()) mask[static_cast<size_t>(token)] = answer.accepts;
  }
  TESSERA_CHECK(std::ranges::find(mask, true) != mask.end(), ErrorKind::kConfig,
                "[text.grammar] no token of the vocabulary may come after {} tokens: the grammar of the answer needs "
                "bytes with which no token begins",
                generated_tokens.size());
  return mask;
}

bool TokenConstraint::complete(std::span<const int64_t> generated_tokens) {
  while (!prepare_complete(generated_tokens, kSliceSteps)) {
  }
  const auto answer = std::exchange(prepared_, std::nullopt)->answer;
  return answer.accepts && answer.ends;
}

}  // namespace tessera::text
