#include "tessera/state/detail/fsdp1_handover.h"

#include "tessera/base/error.h"
#include "tessera/parallel/fsdp1/fully_sharded_data_parallel.h"
#include "tessera/state/detail/model_names.h"
#include "tessera/state/fsdp1/model_state_dict.h"
#include "tessera/state/fsdp1/optim_state_dict.h"
#include "tessera/state/fsdp1/state_dict_type.h"
#include "tessera/state/fsdp1/units.h"
#include "tessera/state/optimizer_forms.h"

namespace tessera::detail {
namespace {

enum class Direction { kGet, kSet };

StateDictSettings fsdp1_settings(nn::Module& model, const StateDictOptions& options, Direction direction) {
  StateDictSettings settings{.device_mesh = get_state_dict_type(model).device_mesh};
  if (!options.full_state_dict) {
    settings.type = StateDictType::kSharded;
    settings.state_dict_config = ShardedStateDictConfig{.offload_to_cpu = options.cpu_offload};
    settings.optim_state_dict_config = ShardedOptimStateDictConfig{.offload_to_cpu = options.cpu_offload};
    return settings;
  }
  const bool rank0_only = direction == Direction::kGet ? options.cpu_offload : options.broadcast_from_rank0;
  settings.state_dict_config = FullStateDictConfig{.offload_to_cpu = options.cpu_offload, .rank0_only = rank0_only};
  settings.optim_state_dict_config =
      FullOptimStateDictConfig{.offload_to_cpu = options.cpu_offload, .rank0_only = rank0_only};
  return settings;
}

void check_fsdp1_options(const StateDictOptions& options) {
  TESSERA_CHECK(!options.fqn_modifier && options.submodules.empty(), ErrorKind::kConfig,
                "[state] a model under FSDP1 takes neither fqn_modifier nor submodules");
}

optim::Optimizer& only_optimizer(const std::vector<optim::Optimizer*>& optimizers) {
  TESSERA_CHECK(optimizers.size() == 1, ErrorKind::kConfig,
                "[state] found {} optimizers of a model under FSDP1, wanted the one of the whole model",
                optimizers.size());
  return *optimizers.front();
}

// Names of the original parameters of each group.
std::vector<std::vector<std::string>> original_groups(const Fsdp1Units& units, const optim::Optimizer& optimizer) {
  std::vector<std::vector<std::string>> groups;
  for (const auto& group : optimizer.param_groups()) {
    auto& names = groups.emplace_back();
    for (const auto& name : group.params) {
      const auto* parameter = units.find(name);
      TESSERA_CHECK(parameter, ErrorKind::kConfig, "[state] the optimizer's '{}' is no parameter of the model", name);
      names.insert(names.end(), parameter->fqns.begin(), parameter->fqns.end());
    }
  }
  return groups;
}

}  // namespace

bool is_fsdp1(nn::Module& model) { return !flat_parameter_handles(model).empty(); }

StateDict get_fsdp1_model_state(nn::Module& model, const StateDictOptions& options) {
  check_fsdp1_options(options);
  const auto scope = state_dict_type(model, fsdp1_settings(model, options, Direction::kGet));
  auto out = fsdp1_state_dict(model);
  if (options.ignore_frozen_params) {
    const auto handles = flat_parameter_handles(model);
    StateDict frozen;
    for (const auto& handle : handles) {
      for (const auto& member : handle->layout().members()) {
        if (!member.requires_grad) frozen.set(handle->prefix() + member.fqn, {});
      }
    }
    for (const auto& named : model.named_parameters(true)) {
      if (!named.slot->parameter.requires_grad()) frozen.set(named.name, {});
    }
    StateDict trained;
    for (const auto& [key, value] : out) {
      if (!frozen.contains(key)) trained.set(key, value);
    }
    out = std::move(trained);
  }
  verify_model_state_dict(out, options);
  return out;
}

IncompatibleKeys set_fsdp1_model_state(nn::Module& model, const StateDict& values, const StateDictOptions& options) {
  check_fsdp1_options(options);
  const auto scope = state_dict_type(model, fsdp1_settings(model, options, Direction::kSet));
  return load_fsdp1_state_dict(model, values, options.strict && !options.ignore_frozen_params);
}

StateDict get_fsdp1_optimizer_state(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                    const StateDictOptions& options) {
  check_fsdp1_options(options);
  const auto scope = state_dict_type(model, fsdp1_settings(model, options, Direction::kGet));
  auto out = optim_state_dict(model, only_optimizer(optimizers));
  if (!options.flatten_optimizer_state_dict || out.empty()) return out;
  return flatten_optimizer_dict(out);
}

void set_fsdp1_optimizer_state(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                               const StateDict& values, const StateDictOptions& options) {
  check_fsdp1_options(options);
  auto& optimizer = only_optimizer(optimizers);
  const auto scope = state_dict_type(model, fsdp1_settings(model, options, Direction::kSet));
  const auto units = Fsdp1Units::of(model);
  const bool is_read = !options.broadcast_from_rank0 || units.group()->rank() == 0;
  const bool is_flat = is_read && !values.contains("state");
  optim_state_dict_to_load(
      model, optimizer,
      is_flat ? unflatten_optimizer_dict(values, original_groups(units, optimizer)) : (is_read ? values : StateDict()),
      {.load_directly = true});
}

}  // namespace tessera::detail
