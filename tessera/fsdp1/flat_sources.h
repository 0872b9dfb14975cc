// Which parameters below a module become one flat parameter, in upstream's order, and those on the meta device before
// that.
#pragma once

#include <functional>
#include <vector>

#include "tessera/fsdp1/flat_group.h"
#include "tessera/nn/module.h"

namespace tessera {

// Calls param_init_fn for each module of the unit (none below a nested one) that has own parameters or buffers on the
// meta device, outermost first. Error kShape when one of them is left there, or when parameters that were one tensor
// are two afterwards. No communication.
void materialise(nn::Module& module, const std::function<void(nn::Module&)>& param_init_fn);

struct FlatSources {
  std::vector<FlatSource> sources;
  std::vector<SharedFlatMember> shared;
};

// The parameters below `module` that no unit of `nested` has; a shared one once. Names are from `module`.
// Errors kShape: DTensors, parameters on the meta device, parts of other flat parameters, parameters tied to one of a
// nested unit.
FlatSources flat_sources(nn::Module& module, const std::vector<FlatGroup*>& nested);

}  // namespace tessera
