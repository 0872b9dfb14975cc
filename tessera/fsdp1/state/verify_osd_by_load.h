// Checks an optimizer state dict by names by loading it into the optimizer of an unsharded copy of the model on one
// device. The loaded state must then equal the state of a reference optimizer that trained there.
//
//   verify_osd_by_load(unsharded_model, *unsharded_optimizer, optim_state_dict(*model, *optimizer), *reference);
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
  std::shared_ptr<comm::Group> group = {};  // the ranks that verify together; null: this rank alone
};

// Verifies `optim_state_dict`: loads it into `unsharded_optimizer` and compares the result with `reference`.
// `unsharded_model` is an unsharded module with the original parameters, `unsharded_optimizer` is its optimizer, and
// `reference` is the optimizer of another unsharded module with the same parameters. Sharded values are gathered one at
// a time. COLLECTIVE over options.group, and over the groups of sharded values. Error kShape, on all ranks of
// options.group, lists the parameters and states that differ or are missing.
void verify_osd_by_load(nn::Module& unsharded_model, optim::Optimizer& unsharded_optimizer,
                        const StateDict& optim_state_dict, const optim::Optimizer& reference,
                        const VerifyOsdOptions& options = {});

}  // namespace tessera
