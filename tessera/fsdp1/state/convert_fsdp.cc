#include "tessera/fsdp1/state/convert_fsdp.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/fsdp1/state/flatten_optim_state.h"
#include "tessera/fsdp1/state/model_state_dict.h"
#include "tessera/fsdp1/state/saved_states.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/optimizer_dict.h"

namespace tessera {
namespace {

// Returns the parameters and persistent buffers by name. A shared tensor is under its first name only with
// `first_only`, else under every name.
StateDict tensors_by_name(nn::Module& module, bool first_only) {
  StateDict tensors;
  for (const auto& parameter : module.named_parameters(/*all=*/!first_only)) {
    tensors.set(parameter.name, parameter.slot->parameter.detach());
  }
  for (const auto& [path, child] : module.named_modules()) {
    for (const auto& buffer : child->own_buffers()) {
      if (!buffer.persistent || !buffer.slot->defined()) continue;
      tensors.set(path.empty() ? buffer.name : path + "." + buffer.name, buffer.slot->detach());
    }
  }
  return tensors;
}

// A member of an FSDP1 unit and the FSDP2 tensor that it is copied into.
struct MemberCopy {
  FlatTensorLayout layout;
  at::Tensor piece;
  at::Tensor target;
};

// Finds the FSDP2 tensor (target) of every FSDP1 member, and of every FSDP1 tensor outside units. For tensors outside
// units, the pairs (tensor, target) are appended to `plain`. Every tensor of the FSDP1 model must have a target of its
// shape, and every target must be used.
std::vector<MemberCopy> plan_member_copies(nn::Module& fsdp1, const Fsdp1Units& model, const StateDict& targets,
                                           std::vector<std::pair<at::Tensor, at::Tensor>>& plain) {
  std::vector<MemberCopy> found;
  std::set<std::string> used;
  const auto take = [&](const std::vector<std::string>& names, at::IntArrayRef shape) -> at::Tensor {
    const StateValue* target = nullptr;
    for (const auto& name : names) {
      if (const auto* value = targets.find(name)) {
        used.insert(name);
        target = value;
      }
    }
    TESSERA_CHECK(target, ErrorKind::kShape,
                  "[fsdp1.convert] {}: the FSDP2 model has no such tensor. Build both of the same modules.", names[0]);
    TESSERA_CHECK(target->tensor().sizes() == shape, ErrorKind::kShape,
                  "[fsdp1.convert] {}: shape [{}] in the FSDP1 model, [{}] in the FSDP2 model", names[0],
                  fmt::join(shape, ", "), fmt::join(target->tensor().sizes(), ", "));
    return target->tensor();
  };
  for (const auto& unit : model.units()) {
    for (size_t member = 0; member < unit.fqns.size(); ++member) {
      const auto& layout = unit.member_layout(member);
      found.push_back(
          {layout, unit.member_shard(unit.handle->shard().detach(), member), take(unit.names(member), layout.shape)});
    }
  }
  for (const auto& [names, tensor, is_parameter, saved_dtype] : unmanaged_tensors(fsdp1, model)) {
    plain.emplace_back(tensor.detach(), take(names, tensor.sizes()));
  }
  for (const auto& [key, value] : targets) {
    TESSERA_CHECK(used.contains(to_string(key)), ErrorKind::kShape,
                  "[fsdp1.convert] {}: the FSDP1 model has no such tensor. Build both of the same modules.",
                  to_string(key));
  }
  return found;
}

// The states of one member in FSDP2's optimizer. plan_state_copies() has checked that FSDP1's optimizer has states of
// the same names for the member.
struct MemberStateCopy {
  const Fsdp1Units::Parameter* parameter;
  size_t index;  // of the member in the parameter
  std::map<std::string, at::Tensor> states;
};

// The FSDP2 optimizer has one parameter per member and finds it by any of the member's names.
std::vector<MemberStateCopy> plan_state_copies(const Fsdp1Units& model, const MergedOptimStates& merged,
                                               const optim::Optimizer& to) {
  const auto names = to.parameter_names();
  const std::set<std::string> known(names.begin(), names.end());
  std::vector<MemberStateCopy> targets;
  for (const auto* parameter : merged.parameters) {
    TESSERA_CHECK(parameter->unit, ErrorKind::kShape,
                  "[fsdp1.convert] {} is trained, but no FSDP1 unit has it. Wrap the root module too.",
                  parameter->name);
    const auto& state = merged.states.at(parameter);
    for (size_t i = 0; i < parameter->fqns.size(); ++i) {
      const auto& unit = model.units()[*parameter->unit];
      const auto aliases = unit.names(parameter->first_member + i);
      const auto name = std::ranges::find_if(aliases, [&](const auto& n) { return known.contains(n); });
      TESSERA_CHECK(name != aliases.end(), ErrorKind::kShape,
                    "[fsdp1.convert] {}: the FSDP2 optimizer has no such parameter. Train the same ones.", aliases[0]);
      auto& target = targets.emplace_back(MemberStateCopy{parameter, i, to.state(*name)});
      std::set<std::string> have, expected_states;
      for (const auto& [key, dtype] : state.tensors) have.insert(key);
      for (const auto& [key, value] : state.others) have.insert(to_string(key));
      for (const auto& [key, tensor] : target.states) expected_states.insert(key);
      TESSERA_CHECK(have == expected_states, ErrorKind::kShape,
                    "[fsdp1.convert] {}: the FSDP1 optimizer has states ({}), the FSDP2 optimizer has ({}). Make both "
                    "with the same options.",
                    aliases[0], fmt::join(have, ", "), fmt::join(expected_states, ", "));
    }
  }
  return targets;
}

}  // namespace

void copy_fsdp1_to_fsdp2(nn::Module& fsdp1, nn::Module& fsdp2) {
  const c10::NoGradGuard no_grad;
  const auto model = Fsdp1Units::of(fsdp1);
  std::vector<MemberCopy> members;
  std::vector<std::pair<at::Tensor, at::Tensor>> plain;
  comm::attempt_together(*model.group(), [&] {
    members = plan_member_copies(fsdp1, model, tensors_by_name(fsdp2, /*first_only=*/false), plain);
  });
  // The conversion of each member is a collective. All ranks have the same units in the same order, so they call these
  // collectives in the same order.
  for (const auto& [layout, piece, target] : members) {
    local_tensor_of(target).copy_(to_layout_of(layout, piece, target));
  }
  for (const auto& [source, target] : plain) {
    const auto layout = replicated_layout("a tensor outside FSDP1", source, model.group());
    local_tensor_of(target).copy_(to_layout_of(layout, source.reshape({-1}), target));
  }
}

// A DTensor is one of the forms that load_fsdp1_state_dict reads, so the FSDP2 model's tensors are loaded as a state
// dict.
void copy_fsdp2_to_fsdp1(nn::Module& fsdp2, nn::Module& fsdp1) {
  const StateDictTypeScope scope(fsdp1, {.type = StateDictType::kSharded});
  load_fsdp1_state_dict(fsdp1, tensors_by_name(fsdp2, /*first_only=*/true));
}

void copy_fsdp1_to_fsdp2(nn::Module& fsdp1, const optim::Optimizer& from, optim::Optimizer& to) {
  const c10::NoGradGuard no_grad;
  const auto model = Fsdp1Units::of(fsdp1);
  comm::Group& group = *model.group();
  const auto saved = optimizer_state_dict(from);
  LocalOptimStates local;
  comm::attempt_together(group,
                         [&] { local = find_local_optim_states(model, optimizer_parameter_names(from), saved); });
  const auto merged = merge_states_of_ranks(model, local, group);
  std::vector<MemberStateCopy> targets;
  comm::attempt_together(group, [&] { targets = plan_state_copies(model, merged, to); });
  for (const auto& [parameter, index, states] : targets) {
    const auto& merged_state = merged.states.at(parameter);
    for (const auto& [name, dtype] : merged_state.tensors) {
      const auto layout = model.units()[*parameter->unit].member_layout(parameter->first_member + index).named(name);
      const at::Tensor piece = local_state_range(model, *parameter, index, local.state_of(parameter), name, dtype);
      const at::Tensor& target = states.at(name);
      local_tensor_of(target).copy_(to_layout_of(layout, piece, target));
    }
    for (const auto& [key, value] : merged_state.others) states.at(to_string(key)).copy_(value.tensor());
  }
  to.set_lr(from.lr());
  to.set_step(from.steps());
}

void copy_fsdp2_to_fsdp1(const optim::Optimizer& from, nn::Module& fsdp1, optim::Optimizer& to) {
  const c10::NoGradGuard no_grad;
  const auto model = Fsdp1Units::of(fsdp1);
  comm::Group& group = *model.group();
  const auto names = optimizer_parameter_names(from);
  StateDict states;
  const auto saved = optimizer_state_dict(from);
  for (const auto& [key, state] : saved.at("state").dict()) {
    states.set(names[static_cast<size_t>(std::get<int64_t>(key))], state);
  }
  comm::attempt_together(group, [&] {
    for (const auto& [key, state] : states) {
      TESSERA_CHECK(model.find_fqn(to_string(key)), ErrorKind::kShape,
                    "[fsdp1.convert] {}: the FSDP1 model has no such parameter. Build both of the same modules.",
                    to_string(key));
    }
  });
  // The flattened state is loaded together with the param_groups that `to` has already, so the hyper-parameters of `to`
  // stay. Only its learning rate is set to that of `from`, by set_lr() below.
  const auto flat = flatten_optim_state_dict(model, StateDict{{"state", std::move(states)}}, {});
  comm::attempt_together(group, [&] {
    auto loaded = rekey_flattened(flat, model, parameter_group_names(to), /*by_name=*/false);
    loaded.set("param_groups", optimizer_state_dict(to).at("param_groups"));
    load_optimizer_state_dict(to, loaded);
  });
  to.set_lr(from.lr());
  to.set_step(from.steps());
}

}  // namespace tessera
