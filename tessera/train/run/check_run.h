// Checks of a run before it begins.
//
//   check_run_folder(recipe);             // before there are ranks
//   check_run(recipe, /*world_size=*/4);  // `tessera train --check`
//
// No communication.
#pragma once

#include <cstdint>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// Checks the folder of the run before it is created or locked; writes nothing. Error kConfig if a file that no run
// wrote has a name that the run needs, or if the run would export over the model that it starts from.
void check_run_folder(const Recipe& recipe);

// Checks recipe, data, model config, the headers of the weights, and the layout for `world_size` ranks, without
// training. Prints a summary of the run to stdout. Errors as Trainer().
void check_run(const Recipe& recipe, int64_t world_size);

}  // namespace tessera::train
