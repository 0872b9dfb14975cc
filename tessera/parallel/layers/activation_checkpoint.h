// Activations that are computed again in backward instead of kept.
//
//   checkpoint_activations(*layer);              // keeps its inputs, and runs it again when its gradient is known
//
// Numbers do not change: forward is deterministic. Inside the module's hooks, so that FSDP gathers and frees as without
// it, while hooks of modules below run twice. Gradients of parameters flow through the graph of the forward that was
// wrapped, so that they arrive once, together with those of other uses.
//
// The second forward is COLLECTIVE as the first. A module belongs to one rank.
#pragma once

#include <string>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

enum class ActivationCheckpointing {
  kNone,
  kMlp,        // recomputes each layer's mlp
  kSelective,  // recomputes each layer but its attention and every second product, whose results it keeps
  kFull,       // recomputes each layer
};
// "none", "mlp", "selective", "full"; "true" is mlp and "false" none. Error kConfig for others.
ActivationCheckpointing parse_activation_checkpointing(const std::string& text);

// Keeps what selective checkpointing keeps, when asked to. Error kConfig for a module that has a wrapper already.
void checkpoint_activations(nn::Module& module, bool selective = false);

// Whether it is checkpointed and keeps nothing but inputs and results.
bool keeps_inputs_only(const nn::Module& module);

// Of decoder layers. kMlp wants a child named mlp in each: Error kConfig without.
void checkpoint_layers(const std::vector<nn::Module*>& layers, ActivationCheckpointing how);

}  // namespace tessera
