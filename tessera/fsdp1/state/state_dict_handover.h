// Models under FSDP1 (wrap_fsdp1): what get_ and set_ of state_dict.h hand over to.
#pragma once

#include "tessera/state/state_dict.h"

namespace tessera::detail {

// Whether `model` is wrapped, or a module below it.
bool is_fsdp1(nn::Module& model);

// As the functions of state_dict.h. COLLECTIVE over the FSDP group. One optimizer, that of the whole model: Error
// kConfig for several.
StateDict get_fsdp1_model_state(nn::Module& model, const StateDictOptions& options);
IncompatibleKeys set_fsdp1_model_state(nn::Module& model, const StateDict& values, const StateDictOptions& options);
StateDict get_fsdp1_optimizer_state(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                    const StateDictOptions& options);
void set_fsdp1_optimizer_state(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                               const StateDict& values, const StateDictOptions& options);

}  // namespace tessera::detail
