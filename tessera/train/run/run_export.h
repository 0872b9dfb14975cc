// Exports the model of a run to model/ in its folder: as a Hugging Face folder, or the adapters in PEFT's format.
//
//   export_run(recipe, run_mesh, data, *model, folder.get());      // COLLECTIVE over the world
//
// generation_config.json of the exported folder lists all end tokens: that of the tokenizer and that of a turn in the
// chat template. Other programs then stop generation at the tokens that ended texts in training.
#pragma once

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/train/output/run_folder.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/run/run_setup.h"

namespace tessera::train {

// Writes a new folder and then replaces model/ by it. `folder` is null on all ranks except rank 0. COLLECTIVE over the
// world. Error kIo, the same on all ranks.
void export_run(const Recipe& recipe, const RunMesh& run_mesh, const RunData& data, CausalLM& model, RunFolder* folder);

}  // namespace tessera::train
