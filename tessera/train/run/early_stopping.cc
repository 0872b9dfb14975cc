#include "tessera/train/run/early_stopping.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"

namespace tessera::train {

void EarlyStopping::add_validation(int64_t step, double loss) {
  if (std::isfinite(loss) && (!best_ || loss < *best_ - options_.min_delta)) {
    best_ = loss;
    best_step_ = step;
    without_better_ = 0;
  } else {
    ++without_better_;
  }
}

std::string EarlyStopping::reason() const {
  if (!best_) return fmt::format("{} validations gave no finite loss", without_better_);
  return fmt::format("validation loss has not fallen below {:.4f} (after step {}){} in {} validations", *best_,
                     best_step_, options_.min_delta > 0 ? fmt::format(" by more than {}", options_.min_delta) : "",
                     without_better_);
}

nlohmann::json EarlyStopping::state() const {
  return {{"best", best_ ? nlohmann::json(*best_) : nlohmann::json()},
          {"best_step", best_step_},
          {"without_better", without_better_}};
}

void EarlyStopping::load_state(const nlohmann::json& state) {
  const bool fits = state.is_object() && state.contains("best") &&
                    (state.at("best").is_null() || state.at("best").is_number()) && state.contains("best_step") &&
                    state.at("best_step").is_number_integer() && state.contains("without_better") &&
                    state.at("without_better").is_number_integer();
  TESSERA_CHECK(fits, ErrorKind::kFormat,
                "[train.early_stopping] the checkpoint's state: found {}, wanted best, best_step and without_better. "
                "Use another checkpoint.",
                state.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace).substr(0, 80));
  best_ = state.at("best").is_null() ? std::nullopt : std::optional<double>(state.at("best").get<double>());
  best_step_ = state.at("best_step").get<int64_t>();
  without_better_ = state.at("without_better").get<int64_t>();
}

}  // namespace tessera::train
