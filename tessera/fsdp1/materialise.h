// Modules on the meta device on their way into a flat parameter.
#pragma once

#include <functional>

#include "tessera/nn/module.h"

namespace tessera {

// Calls param_init_fn for each module of the unit (none below a nested one) that has own parameters or buffers on the
// meta device, outermost first. Error kShape when one of them is left there, or when parameters that were one tensor
// are two afterwards. No communication.
void materialise(nn::Module& module, const std::function<void(nn::Module&)>& param_init_fn);

}  // namespace tessera
