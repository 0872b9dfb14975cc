// What a run leaves to others: its model as a Hugging Face folder, or its adapters as PEFT's, in dir/model.
//
//   export_run(recipe, place, *model, folder.get());      // COLLECTIVE over the run; folder: of the chief
#pragma once

#include "tessera/models/causal_lm.h"
#include "tessera/train/recipe.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/run_mesh.h"

namespace tessera::train {

// dir/model is replaced once the new folder is complete. `folder`: null but on the chief. COLLECTIVE over the world.
// Error kIo, the same on all ranks.
void export_run(const Recipe& recipe, const RunMesh& place, CausalLM& model, RunFolder* folder);

}  // namespace tessera::train
