// Throws for logits from which no token can be chosen.
//
//   check_logits(logits, context.size());          // before anything is computed from them
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <span>

namespace tessera {

// Error kInternal for a logit that is NaN or +inf, and when all logits are -inf (a token with logit -inf is never
// chosen). `position` is the position of the token that these logits predict; the first token of the prompt has
// position 0.
void check_logits(std::span<const float> logits, size_t position);

}  // namespace tessera
