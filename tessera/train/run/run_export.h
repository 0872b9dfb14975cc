// What a run leaves to others: its model as a Hugging Face folder, or its adapters as PEFT's, in dir/model.
//
//   export_run(recipe, place, data, *model, folder.get());      // COLLECTIVE over the run; folder: of the chief
//
// generation_config.json of the folder lists all tokens at which the model's texts end, so that other programs stop
// where training had an end: the tokenizer's, and that of a turn of the chat template.
#pragma once

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/train/output/run_folder.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/run/run_setup.h"

namespace tessera::train {

// dir/model is replaced once the new folder is complete. `folder`: null but on the chief. COLLECTIVE over the world.
// Error kIo, the same on all ranks.
void export_run(const Recipe& recipe, const RunMesh& place, const RunData& data, CausalLM& model, RunFolder* folder);

}  // namespace tessera::train
