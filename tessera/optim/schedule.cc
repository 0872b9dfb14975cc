#include "tessera/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::optim {

Schedule::Schedule(ScheduleOptions options) : options_(std::move(options)) {
  const auto& o = options_;
  TESSERA_CHECK(o.name == "cosine" || o.name == "linear" || o.name == "constant", ErrorKind::kConfig,
                "[optim.schedule] found '{}', wanted cosine, linear or constant", o.name);
  TESSERA_CHECK(std::isfinite(o.lr) && o.lr >= 0, ErrorKind::kConfig,
                "[optim.schedule] lr: found {}, wanted at least 0", o.lr);
  TESSERA_CHECK(o.warmup_steps >= 0 && o.total_steps >= 0, ErrorKind::kConfig,
                "[optim.schedule] found {} warm-up steps of {}, wanted none below 0", o.warmup_steps, o.total_steps);
  TESSERA_CHECK(o.min_lr_ratio >= 0 && o.min_lr_ratio <= 1, ErrorKind::kConfig,
                "[optim.schedule] min_lr_ratio: found {}, wanted 0 to 1", o.min_lr_ratio);
}

double Schedule::at(int64_t step) const {
  const auto& o = options_;
  if (step < o.warmup_steps) return o.lr * static_cast<double>(step + 1) / static_cast<double>(o.warmup_steps);
  if (o.name == "constant") return o.lr;
  const auto decay_steps = static_cast<double>(std::max<int64_t>(o.total_steps - o.warmup_steps, 1));
  const double progress = std::min(static_cast<double>(step - o.warmup_steps) / decay_steps, 1.0);
  const double shape = o.name == "linear" ? 1 - progress : (1 + std::cos(std::numbers::pi * progress)) / 2;
  return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * shape);
}

}  // namespace tessera::optim
