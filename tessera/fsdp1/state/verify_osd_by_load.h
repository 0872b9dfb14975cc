// Whether an optimizer state dict by names is right, found out by loading it: into the optimizer of a twin of the model
// on one device, whose state must then be that of an optimizer that trained there.
//
//   verify_osd_by_load(twin, *twin_optimizer, optim_state_dict(*model, *optimizer), *reference);
#pragma once

#include <memory>

#include "tessera/comm/group/group.h"
#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

struct VerifyOsdOptions {
  double rtol = 1e-5;
  double atol = 1e-6;
  std::shared_ptr<comm::Group> group = {};  // whose ranks verify together; none: this rank alone
};

// `twin` is a module without sharding with the original parameters, `twin_optimizer` its optimizer, `reference` the
// optimizer of another such twin. Sharded values are gathered one at a time. COLLECTIVE over the group, and over those
// of sharded values. Error kShape, on all ranks of the group, names parameters and states that differ or are not there.
void verify_osd_by_load(nn::Module& twin, optim::Optimizer& twin_optimizer, const StateDict& optim_state_dict,
                        const optim::Optimizer& reference, const VerifyOsdOptions& options = {});

}  // namespace tessera
