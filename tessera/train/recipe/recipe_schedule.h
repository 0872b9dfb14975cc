// The learning rate schedule of a recipe.
#pragma once

#include <cstdint>

#include "tessera/optim/schedule.h"
#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// The schedule of a run of `steps` optimizer steps. With train.epochs the warm-up is cut to longest_warmup(). Error
// kConfig as optim::Schedule.
optim::Schedule build_schedule(const Recipe& recipe, int64_t steps);
// The most warm-up steps that fit into a run of `steps` steps: all steps, or with wsd the steps before its decay.
int64_t longest_warmup(const ScheduleSection& schedule, int64_t steps);

}  // namespace tessera::train
