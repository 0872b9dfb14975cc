#include "tessera/text/grammar/token_constraint.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::text {
namespace {

constexpr uint64_t kSliceSteps = 200'000;  // steps between two checks of the memory limit

}  // namespace

// A prepared answer is used if the next call has the same number of tokens; between the two calls the sequence does not
// change, so they are the same tokens.
bool TokenConstraint::prepare(std::span<const int64_t> made, GrammarMasks::Wanted wanted, uint64_t steps) {
  const bool mask = wanted == GrammarMasks::Wanted::kMask;
  if (prepared_ && prepared_->tokens == made.size() && (prepared_->answer.mask || !mask)) return true;
  prepared_.reset();
  auto answer = masks_->look(search_, made, wanted, steps);
  if (!answer) return false;
  prepared_ = Prepared{made.size(), std::move(*answer)};
  return true;
}

bool TokenConstraint::prepare_allowed(std::span<const int64_t> made, uint64_t steps) {
  return prepare(made, GrammarMasks::Wanted::kMask, steps);
}

bool TokenConstraint::prepare_complete(std::span<const int64_t> made, uint64_t steps) {
  return prepare(made, GrammarMasks::Wanted::kPlace, steps);
}

TokenMask TokenConstraint::allowed(std::span<const int64_t> made) {
  while (!prepare_allowed(made, kSliceSteps)) {
  }
  const auto answer = std::exchange(prepared_, std::nullopt)->answer;
  auto mask = *answer.mask;
  for (const int64_t token : stop_tokens_) {
    if (token >= 0 && static_cast<size_t>(token) < mask.size()) mask[static_cast<size_t>(token)] = answer.accepts;
  }
  TESSERA_CHECK(std::ranges::find(mask, true) != mask.end(), ErrorKind::kConfig,
                "[text.grammar] no token of the vocabulary may come after {} tokens: the grammar of the answer needs "
                "bytes with which no token begins",
                made.size());
  return mask;
}

bool TokenConstraint::complete(std::span<const int64_t> made) {
  while (!prepare_complete(made, kSliceSteps)) {
  }
  const auto answer = std::exchange(prepared_, std::nullopt)->answer;
  return answer.accepts && answer.ends;
}

}  // namespace tessera::text
