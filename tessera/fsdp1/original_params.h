// Materialises the parameters of a unit that are on the meta device, and lists the parameters that form the unit's flat
// parameter, in the order of PyTorch.
#pragma once

#include <functional>
#include <vector>

#include "tessera/fsdp1/flat_param_group.h"
#include "tessera/nn/module.h"

namespace tessera {

// Calls param_init_fn for each module of the unit that has own parameters or buffers on the meta device, outermost
// first. Modules of nested units are not visited. Error kShape when a tensor is still on the meta device afterwards, or
// when a shared parameter has become two tensors. No communication.
void materialise(nn::Module& module, const std::function<void(nn::Module&)>& param_init_fn);

struct OriginalParams {
  std::vector<OriginalParam> params;
  std::vector<SharedFlatMember> shared;
};

// Returns the parameters below `module` that are in no unit of `nested`; a shared parameter is listed once. Names are
// relative to `module`. Errors kShape: DTensors, parameters on the meta device, tensors that are part of another flat
// parameter, parameters shared with a nested unit.
OriginalParams collect_original_params(nn::Module& module, const std::vector<FlatParamGroup*>& nested);

}  // namespace tessera
