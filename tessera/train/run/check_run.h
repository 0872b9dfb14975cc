// What can be known of a run before it begins.
//
//   check_run_folder(recipe);             // before there are ranks
//   check_run(recipe, /*world_size=*/4);  // `tessera train --check`
//
// No communication.
#pragma once

#include <cstdint>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// What can be said of the run's folder before it is made or taken; writes nothing. Error kConfig when something that no
// run wrote is in the way, or the run would export over the model that it starts from.
void check_run_folder(const Recipe& recipe);

// Everything that can be known without training: recipe, data, model config and weights' headers, layout. Prints what
// the run would be. Errors as Trainer's.
void check_run(const Recipe& recipe, int64_t world_size);

}  // namespace tessera::train
