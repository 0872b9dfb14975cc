// Logits from which no token can be chosen.
//
//   check_logits(logits, context.size());          // before anything is computed from them
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <span>

namespace tessera {

// Error kInternal for a logit that is NaN or +inf, and where all are -inf, which is the logit of a token that never
// comes. position: of the token that the logits are of; the first of the prompt has 0.
void check_logits(std::span<const float> logits, size_t position);

}  // namespace tessera
