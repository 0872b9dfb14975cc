// The former names of optim_state_dict and optim_state_dict_to_load, for programs that were written for them. They do
// not look at the model's state_dict_type, and log that they are deprecated.
//
//   StateDict full = full_optim_state_dict(*model, *optimizer);                     // {} but on rank 0
//   load_optimizer_state_dict(*optimizer, scatter_full_optim_state_dict(full, *model, *optimizer));
//
// Each is COLLECTIVE over the FSDP group, or the group given. Errors as of the functions that replace them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_value.h"

namespace tessera {

struct LegacyOptimOptions {
  bool rank0_only = true;  // full_optim_state_dict only
  std::shared_ptr<comm::Group> group = {};
  // Names of the optimizer's parameters by id. Deprecated: the optimizer knows them.
  std::optional<std::vector<std::string>> optim_input = std::nullopt;
};

StateDict full_optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer,
                                const LegacyOptimOptions& options = {});
StateDict sharded_optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer,
                                   const LegacyOptimOptions& options = {});
// Every rank passes the whole.
StateDict shard_full_optim_state_dict(const StateDict& full, nn::Module& model, const optim::Optimizer& optimizer,
                                      const LegacyOptimOptions& options = {});
StateDict flatten_sharded_optim_state_dict(const StateDict& sharded, nn::Module& model,
                                           const optim::Optimizer& optimizer, const LegacyOptimOptions& options = {});
// Rank 0 passes the whole, others nullopt or anything.
StateDict scatter_full_optim_state_dict(const std::optional<StateDict>& full, nn::Module& model,
                                        const optim::Optimizer& optimizer, const LegacyOptimOptions& options = {});

}  // namespace tessera
