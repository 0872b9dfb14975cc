// The earlier names of optim_state_dict and optim_state_dict_to_load, for programs that were written with these
// names. The functions of this file ignore the model's state_dict_type and log a deprecation warning.
//
//   StateDict full = full_optim_state_dict(*model, *optimizer);                     // {} on ranks other than 0
//   load_optimizer_state_dict(*optimizer, scatter_full_optim_state_dict(full, *model, *optimizer));
//
// Each function is COLLECTIVE over the FSDP group, or over the given group. Errors are those of the functions
// that replace them.
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
  bool rank0_only = true;  // for full_optim_state_dict only
  std::shared_ptr<comm::Group> group = {};
  // Names of the optimizer's parameters by id. Deprecated, because the names are taken from the optimizer by default.
  std::optional<std::vector<std::string>> optim_input = std::nullopt;
};

StateDict full_optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer,
                                const LegacyOptimOptions& options = {});
StateDict sharded_optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer,
                                   const LegacyOptimOptions& options = {});
// Converts the dict of full_optim_state_dict() into a dict for load_optimizer_state_dict(). Every rank passes the whole
// dict.
StateDict shard_full_optim_state_dict(const StateDict& full, nn::Module& model, const optim::Optimizer& optimizer,
                                      const LegacyOptimOptions& options = {});
StateDict flatten_sharded_optim_state_dict(const StateDict& sharded, nn::Module& model,
                                           const optim::Optimizer& optimizer, const LegacyOptimOptions& options = {});
// Like shard_full_optim_state_dict(), but only rank 0 passes the whole dict `full`; the argument of the other ranks is
// ignored.
StateDict scatter_full_optim_state_dict(const std::optional<StateDict>& full, nn::Module& model,
                                        const optim::Optimizer& optimizer, const LegacyOptimOptions& options = {});

}  // namespace tessera
