// Throws for logits from which no token can be chosen.
//
//   check_logits(logits, context.size());          // before anything is computed from them
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <span>

namespace tessera {

// Checks the logits of one position. Error kInternal if there are no logits, if a logit is NaN or +inf, or if all
// logits are -inf (a token with logit -inf is never chosen). `position` is the position of the token that these logits
// predict; the first token of the prompt has position 0.
void check_logits(std::span<const float> logits, size_t position);

}  // namespace tessera
