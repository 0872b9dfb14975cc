#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::optim {
namespace {

// Returns the factor of the decay: 1 at progress 0, 0 at progress 1.
double decay_shape(const std::string& type, double progress) {
  if (type == "linear") return 1 - progress;
  if (type == "1-sqrt") return 1 - std::sqrt(progress);
  return (1 + std::cos(std::numbers::pi * progress)) / 2;
}

void check_wsd(const ScheduleOptions& o, int64_t decay_steps) {
  TESSERA_CHECK(o.decay_type == "linear" || o.decay_type == "cosine" || o.decay_type == "1-sqrt", ErrorKind::kConfig,
                "[optim.schedule] decay_type: found {}, wanted linear, cosine or 1-sqrt", quote(o.decay_type));
  TESSERA_CHECK(o.decay_ratio >= 0 && o.decay_ratio <= 1, ErrorKind::kConfig,
                "[optim.schedule] decay_ratio: found {}, wanted 0 to 1", o.decay_ratio);
  TESSERA_CHECK(
      decay_steps >= 0 && decay_steps <= o.total_steps - o.warmup_steps, ErrorKind::kConfig,
      "[optim.schedule] wsd of {} steps: found {} steps of warm-up and {} of decay, wanted at most {} together. "
      "Lower schedule.warmup_steps, schedule.decay_steps or schedule.decay_ratio.",
      o.total_steps, o.warmup_steps, decay_steps, o.total_steps);
}

}  // namespace

Schedule::Schedule(ScheduleOptions options) : options_(std::move(options)) {
  const auto& o = options_;
  TESSERA_CHECK(o.name == "cosine" || o.name == "linear" || o.name == "constant" || o.name == "wsd", ErrorKind::kConfig,
                "[optim.schedule] found {}, wanted cosine, linear, constant or wsd", quote(o.name));
  TESSERA_CHECK(std::isfinite(o.lr) && o.lr >= 0, ErrorKind::kConfig,
                "[optim.schedule] lr: found {}, wanted at least 0", o.lr);
  TESSERA_CHECK(o.warmup_steps >= 0 && o.total_steps >= 0, ErrorKind::kConfig,
                "[optim.schedule] found {} warm-up steps of {} steps, wanted numbers of at least 0", o.warmup_steps,
                o.total_steps);
  TESSERA_CHECK(o.min_lr_ratio >= 0 && o.min_lr_ratio <= 1, ErrorKind::kConfig,
                "[optim.schedule] min_lr_ratio: found {}, wanted 0 to 1", o.min_lr_ratio);
  decay_start_ = o.warmup_steps;
  if (o.name != "wsd") return;
  const int64_t decay_steps = o.decay_steps.value_or(std::llround(o.decay_ratio * static_cast<double>(o.total_steps)));
  check_wsd(o, decay_steps);
  decay_start_ = o.total_steps - decay_steps;
}

double Schedule::at(int64_t step) const {
  const auto& o = options_;
  if (step < o.warmup_steps) return o.lr * static_cast<double>(step + 1) / static_cast<double>(o.warmup_steps);
  if (o.name == "constant" || (step < decay_start_ && o.name == "wsd")) return o.lr;
  const auto decay_steps = static_cast<double>(std::max<int64_t>(o.total_steps - decay_start_, 1));
  // A wsd schedule without decay steps drops to its floor at the end.
  const bool over = o.name == "wsd" && step >= o.total_steps;
  const double progress = over ? 1.0 : std::min(static_cast<double>(step - decay_start_) / decay_steps, 1.0);
  const double shape = decay_shape(o.name == "wsd" ? o.decay_type : o.name, progress);
  return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * shape);
}

}  // namespace tessera::optim
