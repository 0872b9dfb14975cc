// The learning rate schedule that a recipe asks for.
#pragma once

#include <cstdint>

#include "tessera/optim/schedule.h"
#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// In a run of whole epochs the warm-up is cut to longest_warmup().
optim::Schedule build_schedule(const Recipe& recipe, int64_t steps);
// Steps of warm-up that a run of so many steps has room for, before the decay of wsd.
int64_t longest_warmup(const ScheduleSection& schedule, int64_t steps);

}  // namespace tessera::train
