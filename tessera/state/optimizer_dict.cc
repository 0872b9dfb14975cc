#include "tessera/state/optimizer_dict.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/optim/quantized_moments.h"
#include "tessera/state/detail/load_tensor.h"
#include "tessera/state/detail/optimizer_load.h"
#include "tessera/state/detail/optimizer_parts.h"
#include "tessera/state/hyperparameter_values.h"

namespace tessera {
namespace detail {
namespace {

constexpr const char* kMasterState = "master";

// PyTorch saves `step` as a number or as a tensor of one element.
double step_value(const std::string& name, const StateValue& value) {
  if (value.is_int() || value.is_double()) return value.number();
  TESSERA_CHECK(
      value.is_tensor() && value.tensor().defined() && !value.tensor().is_meta() && value.tensor().numel() == 1,
      ErrorKind::kShape, "[state.load_optimizer] {}: step is a {}, wanted one number", quote(name), type_name(value));
  return local_tensor_of(value.tensor().detach()).item().toDouble();
}

// Whether a state has no value: it is absent, None, or the empty dict that older flattened dicts of stateless
// optimizers have.
bool is_missing(const StateValue* value) {
  return value == nullptr || value->is_none() || (value->is_dict() && value->dict().empty());
}

// Ids are positions over all groups. If the saved optimizer had its parameters in another order than this optimizer,
// each state would be loaded into the wrong parameter. Therefore `param_names` is compared if the dict has it.
void check_names(const StateDict& group, const std::vector<std::string>& params) {
  const auto* saved = group.find("param_names");
  if (saved == nullptr || !saved->is_list() || saved->list().size() != params.size()) return;
  std::unordered_map<std::string, size_t> ours;
  for (size_t i = 0; i < params.size(); ++i) ours.emplace(params[i], i);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& value = saved->list()[i];
    if (!value.is_string()) return;
    const auto found = ours.find(value.string());
    TESSERA_CHECK(found == ours.end() || found->second == i, ErrorKind::kShape,
                  "[state.load_optimizer] param_names: found {} as number {} of its group, this optimizer has it as "
                  "number {}. Load it by names (set_optimizer_state_dict).",
                  quote(value.string()), i, found->second);
  }
}

// Id of a saved parameter -> position of the parameter in this optimizer.
using PositionsById = std::unordered_map<int64_t, size_t>;

// Matches the ids in a saved dict to this optimizer's parameters by position, as torch.optim does. In a dict without
// `param_groups` the id of a parameter is its position.
PositionsById match_ids(const StateDict& state_dict, const std::vector<optim::ParamGroup>& groups) {
  PositionsById ids;
  size_t position = 0;
  const auto* saved_groups = state_dict.find("param_groups");
  if (saved_groups == nullptr) {
    for (const auto& group : groups) {
      for (size_t i = 0; i < group.params.size(); ++i, ++position) {
        ids.emplace(static_cast<int64_t>(position), position);
      }
    }
    return ids;
  }
  TESSERA_CHECK(saved_groups->list().size() == groups.size(), ErrorKind::kShape,
                "[state.load_optimizer] loaded state dict has a different number of parameter groups: found {}, this "
                "optimizer has {}",
                saved_groups->list().size(), groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const StateDict& saved = saved_groups->list()[i].dict();
    const StateList& params = saved.at("params").list();
    TESSERA_CHECK(params.size() == groups[i].params.size(), ErrorKind::kShape,
                  "[state.load_optimizer] loaded state dict contains a parameter group that doesn't match the size of "
                  "optimizer's group: group {} has {} parameters, found {}",
                  i, groups[i].params.size(), params.size());
    check_names(saved, groups[i].params);
    for (const auto& id : params) {
      TESSERA_CHECK(id.is_int(), ErrorKind::kShape,
                    "[state.load_optimizer] params of group {}: found a {}, wanted numbers. Load a dict with names "
                    "through set_optimizer_state_dict.",
                    i, type_name(id));
      TESSERA_CHECK(ids.emplace(id.integer(), position++).second, ErrorKind::kShape,
                    "[state.load_optimizer] params of group {}: parameter {} is there twice", i, id.integer());
    }
  }
  return ids;
}

}  // namespace

// Checks one entry of `state` and plans its copies. An entry is complete or absent: a parameter with steps needs every
// state of the optimizer, except master (then copied from the parameter) and momentum_buffer (then the next step starts
// a new buffer, as step 0 does). An entry with a state needs a step, except that torch.optim.SGD saves a
// momentum_buffer without one.
void OptimizerLoad::plan_state(ParameterPlan& parameter, size_t position, const StateValue& entry) {
  TESSERA_CHECK(entry.is_dict(), ErrorKind::kShape, "[state.load_optimizer] {}: its state is a {}, wanted a dict",
                quote(parameter.name), type_name(entry));
  const StateDict& values = entry.dict();
  auto expected_states = state_names_[parameter.group];
  const auto own = optimizer_->state(parameter.name);
  const bool has_master = optimizer_->has_master(parameter.name);
  if (has_master) expected_states.emplace_back(kMasterState);
  const auto* step = values.find("step");
  if (!is_missing(step)) parameter.step = step_value(parameter.name, *step);

  parameter.first_copy = copies_.size();
  for (const auto& state : expected_states) {
    const auto* value = values.find(state);
    if (is_missing(value)) {
      TESSERA_CHECK(state == kMasterState || state == "momentum_buffer" || parameter.step == 0, ErrorKind::kShape,
                    "[state.load_optimizer] {}: found step {} without {}. Save all states of a parameter, or none.",
                    quote(parameter.name), parameter.step, state);
      if (state == "momentum_buffer") parameter.step = 0;  // the next step uses the gradient as the first momentum
      continue;
    }
    TESSERA_CHECK(value->is_tensor(), ErrorKind::kShape, "[state.load_optimizer] {}: {} is a {}, wanted a Tensor",
                  quote(parameter.name), state, type_name(*value));
    const auto like = own.find(state);
    const auto form =
        like != own.end() ? like->second : optim::state_template(state, optimizer_->slot(parameter.name).parameter);
    const auto mismatch = load_mismatch(form, value->tensor());
    TESSERA_CHECK(mismatch.empty(), ErrorKind::kShape, "[state.load_optimizer] {}: {} {}", quote(parameter.name), state,
                  mismatch);
    copies_.push_back({position, state, value->tensor(), {}});
    if (is_missing(step)) {
      TESSERA_CHECK(state == "momentum_buffer" || state == kMasterState, ErrorKind::kShape,
                    "[state.load_optimizer] {}: found {} without step. Save both, or neither.", quote(parameter.name),
                    state);
      // torch.optim.SGD saves no step count. At step 0 the optimizer would start a new buffer, so the step is set to 1.
      // With any step count other than 0 the optimizer continues with the saved momentum_buffer.
      if (state == "momentum_buffer") parameter.step = 1;
    }
  }
  parameter.copies = copies_.size() - parameter.first_copy;
}

OptimizerLoad plan_optimizer_load(optim::Optimizer& optimizer, const StateDict& state_dict) {
  OptimizerLoad load;
  load.optimizer_ = &optimizer;
  const auto groups = optimizer.param_groups();
  const auto* saved_groups = state_dict.find("param_groups");
  const PositionsById ids = match_ids(state_dict, groups);
  for (size_t i = 0; i < groups.size(); ++i) {
    load.groups_.push_back(saved_groups ? hyperparameters_of(saved_groups->list()[i].dict())
                                        : optim::Hyperparameters{});
    for (const auto& name : groups[i].params) load.parameters_.push_back({.name = name, .group = i});
  }
  load.state_names_ = optimizer.check_hyperparameters(load.groups_);
  for (const auto& [key, entry] : state_dict.at("state").dict()) {
    const auto* id = std::get_if<int64_t>(&key);
    TESSERA_CHECK(id, ErrorKind::kShape,
                  "[state.load_optimizer] state has the key {}, wanted numbers of parameters. Load a dict with names "
                  "through set_optimizer_state_dict.",
                  quote(to_string(key)));
    const auto found = ids.find(*id);
    if (found != ids.end()) load.plan_state(load.parameters_[found->second], found->second, entry);
  }
  return load;
}

// Prepares the optimizer for copying the values of the dict into its states: sets the hyper-parameters, resets every
// state that gets no value, and looks up the tensor that each value of copies_ will be written to.
void OptimizerLoad::begin() {
  clone_aliased_sources();
  optimizer_->set_hyperparameters(groups_);
  for (auto& parameter : parameters_) {
    const auto copies = std::span(copies_).subspan(parameter.first_copy, parameter.copies);
    // A state that gets a value from the dict is not reset: optimizer_state_dict() does not copy, so the value may be
    // the same memory as the state, and a reset would overwrite it.
    std::set<std::string> states_with_values;
    for (const auto& copy : copies) states_with_values.insert(copy.state);
    optimizer_->reset_state(parameter.name, /*even_frozen=*/!states_with_values.empty(), states_with_values);
    const auto states = optimizer_->state(parameter.name);
    parameter.step_target = states.at("step");
    for (auto& copy : copies) copy.target = states.at(copy.state);
  }
}

// The dict may share memory with this optimizer and have the state of one parameter under the id of another (two
// swapped states, for example). The first copy would then overwrite the source of the second. Therefore such sources
// are cloned before any state is written.
void OptimizerLoad::clone_aliased_sources() {
  const auto storage_of = [](const at::Tensor& tensor) -> const c10::StorageImpl* {
    const at::Tensor local = local_tensor_of(tensor.detach());
    return local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
  };
  std::unordered_map<const c10::StorageImpl*, std::pair<size_t, std::string>> own;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    for (const auto& [state, value] : optimizer_->state(parameters_[i].name)) {
      own.insert({storage_of(value), {i, state}});
    }
  }
  for (auto& copy : copies_) {
    const auto found = own.find(storage_of(copy.source));
    if (found == own.end() || found->second == std::pair(copy.parameter, copy.state)) continue;
    copy.source = copy.source.detach().clone();
  }
}

// Sets the step of each parameter to the loaded value, because begin() may have reset the step. The optimizer's own
// step count becomes the largest step of its parameters.
void OptimizerLoad::finish() {
  const c10::NoGradGuard no_grad;
  double max_step = 0;
  for (const auto& parameter : parameters_) {
    parameter.step_target.fill_(parameter.step);
    max_step = std::max(max_step, parameter.step);
  }
  optimizer_->set_step(static_cast<int64_t>(max_step));
}

}  // namespace detail

std::vector<std::string> optimizer_parameter_names(const optim::Optimizer& optimizer) {
  std::vector<std::string> names;
  for (const auto& group : optimizer.param_groups()) {
    names.insert(names.end(), group.params.begin(), group.params.end());
  }
  return names;
}

StateDict optimizer_state_dict(const optim::Optimizer& optimizer) {
  StateDict states;
  StateList groups;
  int64_t id = 0;
  for (const auto& group : optimizer.param_groups()) {
    // Every parameter gets an id. Only parameters that require a gradient or have more state than `step` get an entry.
    StateDict group_entry = to_state_dict(group.hyperparameters);
    StateList ids;
    for (const auto& name : group.params) {
      const auto state = optimizer.state(name);
      if (optimizer.slot(name).parameter.requires_grad() || state.size() > 1) {
        StateDict entry;
        entry.set("step", state.at("step"));
        for (const auto& [key, value] : state) {
          if (key != "step") entry.set(key, value);
        }
        states.set(id, std::move(entry));
      }
      ids.emplace_back(id++);
    }
    group_entry.set("params", std::move(ids));
    groups.emplace_back(std::move(group_entry));
  }
  return detail::optimizer_dict_of(std::move(states), std::move(groups));
}

void load_optimizer_state_dict(optim::Optimizer& optimizer, const StateDict& state_dict) {
  auto load = detail::plan_optimizer_load(optimizer, state_dict);
  for (const auto& copy : load.copies()) {
    TESSERA_CHECK(!copy.source.is_meta(), ErrorKind::kShape,
                  "[state.load_optimizer] {}: {} is on the meta device, without values",
                  quote(optimizer_parameter_names(optimizer)[copy.parameter]), copy.state);
  }
  load.begin();
  for (const auto& copy : load.copies()) detail::load_tensor(copy.target, copy.source);
  load.finish();
}

}  // namespace tessera
