// Which parameters below a module become one flat parameter, in upstream's order.
#pragma once

#include <vector>

#include "tessera/fsdp1/flat_group.h"
#include "tessera/nn/module.h"

namespace tessera {

struct FlatSources {
  std::vector<FlatSource> sources;
  std::vector<SharedFlatMember> shared;
};

// The parameters below `module` that no unit of `nested` has; a shared one once. Names are from `module`.
// Errors kShape: DTensors, parameters on the meta device, parts of other flat parameters, parameters tied to one of a
// nested unit.
FlatSources flat_sources(nn::Module& module, const std::vector<FlatGroup*>& nested);

}  // namespace tessera
