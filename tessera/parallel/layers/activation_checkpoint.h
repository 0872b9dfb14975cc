// Activation checkpointing: activations are recomputed in backward instead of kept.
//
//   checkpoint_activations(*layer);              // keeps the layer's inputs, and runs the layer again in backward
//
// Results do not change, because forward is deterministic. The forward hooks of the checkpointed module itself do not
// run again in the recomputation. FSDP's hooks on this module gather its parameters before the recomputation and free
// them after backward, as without checkpointing. Hooks of modules below it run again. The gradients of parameters flow
// through the graph of the first forward, so a parameter gets one gradient, the sum over all its uses.
//
// The recomputed forward is COLLECTIVE like the first forward. A module belongs to one rank.
#pragma once

#include <string>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

enum class ActivationCheckpointing {
  kNone,
  kMlp,        // recomputes the child `mlp` of each layer
  kSelective,  // recomputes each layer, but keeps the results of attention and of every second matrix product
  kFull,       // recomputes each layer
};
// Parses "none", "mlp", "selective" or "full". "true" means mlp, and "false" means none. Error kConfig for other text.
ActivationCheckpointing parse_activation_checkpointing(const std::string& text);

// Checkpoints one module. selective: keeps the results named at ActivationCheckpointing::kSelective. Error kConfig for
// a module that has a forward wrapper already.
void checkpoint_activations(nn::Module& module, bool selective = false);

// Whether the module is checkpointed without `selective`, so that it keeps only inputs and results.
bool keeps_inputs_only(const nn::Module& module);

// Checkpoints decoder layers. Error kConfig for kMlp and a layer without a child named mlp.
void checkpoint_layers(const std::vector<nn::Module*>& layers, ActivationCheckpointing mode);

}  // namespace tessera
