#include "tessera/models/generation/logits_check.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tessera/base/error.h"

namespace tessera {

void check_logits(std::span<const float> logits, size_t position) {
  constexpr float kEndless = std::numeric_limits<float>::infinity();
  TESSERA_CHECK(!logits.empty(), ErrorKind::kInternal, "[models.generate] position {}: no logits", position);
  // This loop has no branches, so that the compiler vectorizes it. It only finds out whether the logits are valid. For
  // invalid logits, the code after the loop searches for the first wrong one.
  int32_t wrong_ones = 0, possible_ones = 0;
  for (const float logit : logits) {
    wrong_ones |= static_cast<int32_t>(!(logit < kEndless));  // true also for NaN
    possible_ones |= static_cast<int32_t>(logit > -kEndless);
  }
  if (wrong_ones == 0 && possible_ones != 0) return;
  const auto wrong = std::ranges::find_if(logits, [](float logit) { return !(logit < kEndless); });
  const bool all_never = wrong == logits.end();
  raise(ErrorKind::kInternal,
        "[models.generate] position {}: the logit of {} is {}. The model overflows there: take a wider --dtype, or "
        "look at its "
        "weights with 'tessera ckpt verify'.",
        position, all_never ? "every token" : fmt::format("token {}", wrong - logits.begin()),
        all_never            ? "-inf"
        : std::isnan(*wrong) ? "nan"
                             : "inf");
}

}  // namespace tessera
