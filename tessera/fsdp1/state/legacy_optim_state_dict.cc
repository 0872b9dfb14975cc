#include "tessera/fsdp1/state/legacy_optim_state_dict.h"

#include "tessera/base/log.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/fsdp1/state/flatten_optim_state.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tessera/state/optimizer_dict.h"

namespace tessera {
namespace {

std::vector<std::string> legacy_names(const optim::Optimizer& optimizer, const LegacyOptimOptions& options,
                                      const char* former, const char* now) {
  log_warning(
      "[fsdp1] ``FullyShardedDataParallel.{}``is being deprecated and is replaced by ``FullyShardedDataParallel.{}``.",
      former, now);
  if (!options.optim_input) return optimizer_parameter_names(optimizer);
  log_warning(
      "[fsdp1] The `optim_input` argument is deprecated. You may remove it from your code without changing its "
      "functionality.");
  return *options.optim_input;
}

StateDict legacy_load(const StateDict& dict, nn::Module& model, const optim::Optimizer& optimizer,
                      const std::vector<std::string>& names, bool rank0_only, const LegacyOptimOptions& options) {
  const auto units = Fsdp1Units::of(model);
  comm::Group& group = options.group ? *options.group : *units.group();
  const auto flat = flatten_optim_state_dict(units, dict, {.rank0_only = rank0_only, .group = options.group});
  // `names` are the optimizer's own parameter names, or the names that the caller passed as optim_input. If they equal
  // the optimizer's, its parameter groups are kept. Otherwise all of `names` form one parameter group, as when a list
  // of parameters is passed to a torch.optim optimizer.
  const bool is_own = names == optimizer_parameter_names(optimizer);
  const auto groups = is_own ? parameter_group_names(optimizer) : ParameterGroupNames(1, names);
  StateDict result;
  comm::attempt_together(group, [&] { result = rekey_flattened(flat, units, groups, /*by_name=*/false); });
  return result;
}

}  // namespace

StateDict full_optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer,
                                const LegacyOptimOptions& options) {
  const auto names = legacy_names(optimizer, options, "full_optim_state_dict", "optim_state_dict");
  const StateDictSettings settings{
      .type = StateDictType::kFull,
      .optim_state_dict_config = FullOptimStateDictConfig{.rank0_only = options.rank0_only}};
  return optim_state_dict(Fsdp1Units::of(model), settings, names, optimizer_state_dict(optimizer), options.group);
}

StateDict sharded_optim_state_dict(nn::Module& model, const optim::Optimizer& optimizer,
                                   const LegacyOptimOptions& options) {
  const auto names = legacy_names(optimizer, options, "sharded_optim_state_dict", "optim_state_dict");
  return optim_state_dict(Fsdp1Units::of(model), {.type = StateDictType::kSharded}, names,
                          optimizer_state_dict(optimizer), options.group);
}

StateDict shard_full_optim_state_dict(const StateDict& full, nn::Module& model, const optim::Optimizer& optimizer,
                                      const LegacyOptimOptions& options) {
  const auto names = legacy_names(optimizer, options, "shard_full_optim_state_dict", "optim_state_dict_to_load");
  return legacy_load(full, model, optimizer, names, /*rank0_only=*/false, options);
}

StateDict flatten_sharded_optim_state_dict(const StateDict& sharded, nn::Module& model,
                                           const optim::Optimizer& optimizer, const LegacyOptimOptions& options) {
  const auto names = legacy_names(optimizer, options, "flatten_sharded_optim_state_dict", "optim_state_dict_to_load");
  return legacy_load(sharded, model, optimizer, names, /*rank0_only=*/false, options);
}

StateDict scatter_full_optim_state_dict(const std::optional<StateDict>& full, nn::Module& model,
                                        const optim::Optimizer& optimizer, const LegacyOptimOptions& options) {
  const auto names = legacy_names(optimizer, options, "scatter_full_optim_state_dict", "optim_state_dict_to_load");
  return legacy_load(full.value_or(StateDict{}), model, optimizer, names, /*rank0_only=*/true, options);
}

}  // namespace tessera
