#include "tessera/fsdp1/state/flatten_optim_state.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <set>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/fsdp1/state/saved_states.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/broadcast_state.h"

namespace tessera {
namespace {

// Called for each value of the saved dict just before it is sharded, to get the values of its tensors. With rank0_only
// it broadcasts rank 0's tensors; otherwise it returns `value` unchanged.
using FetchValue = std::function<StateValue(const StateValue& value, const std::string& subject)>;

bool has_dims(const StateValue& value) {
  const auto shape = value_shape(value);
  return shape && !shape->shape.empty();
}

// Builds the flat state `name` of a unit, one member at a time: each value becomes this rank's range and is copied to
// its place. Members without the state stay zeros.
at::Tensor flatten_tensors(const Fsdp1Unit& unit, const UnitStates& states, const std::string& name,
                           const FetchValue& fetch) {
  const auto& unit_layout = unit.layout();
  at::Tensor flat;
  for (const auto& [member, state] : states) {
    const auto& value = state.at(name);
    if (value.is_none()) continue;
    const auto layout = unit.member_layout(member).named(name);
    const at::Tensor piece = to_local_range(layout, fetch(value, layout.name));
    if (!flat.defined()) {
      const int64_t numel = unit.sharded() ? unit_layout.sharded_numel() : unit_layout.unpadded_numel();
      flat = at::zeros({numel}, at::TensorOptions().dtype(piece.scalar_type()));
    }
    unit.member_shard(flat, member).copy_(piece);
  }
  return flat;
}

// The names are visited in sorted order, so all ranks exchange the states in one order. A value without dims is common
// to all members (check_unit_states), so the first one is taken.
StateDict flatten_unit(const Fsdp1Unit& unit, const UnitStates& states, const FetchValue& fetch) {
  StateDict flat;
  if (states.empty()) return flat;
  std::set<std::string> names;
  for (const auto& [key, value] : states.begin()->second) names.insert(std::get<std::string>(key));
  for (const auto& name : names) {
    const StateValue* first = nullptr;
    for (const auto& [member, state] : states) {
      if (const auto& value = state.at(name); !first && !value.is_none()) first = &value;
    }
    if (!first) {
      flat.set(name, nullptr);
    } else if (has_dims(*first)) {
      flat.set(name, flatten_tensors(unit, states, name, fetch));
    } else if (first->is_tensor()) {
      flat.set(name, first->tensor().detach().cpu().clone());
    } else {
      flat.set(name, clone_state(*first));
    }
  }
  return flat;
}

StateDict shard_member(const Fsdp1Unit& unit, size_t member, const StateDict& state, const FetchValue& fetch) {
  StateDict sharded;
  std::set<std::string> names;  // sorted, so that all ranks exchange the states in one order
  for (const auto& [key, value] : state) names.insert(to_string(key));
  for (const auto& name : names) {
    const auto& value = state.at(name);
    const auto layout = unit.member_layout(member).named(name);
    if (!has_dims(value)) {
      sharded.set(name, clone_state(fetch(value, layout.name)));
      continue;
    }
    TESSERA_CHECK(value_shape(value)->shape == layout.shape, ErrorKind::kShape,
                  "[fsdp1.load] {}: Tensor optimizer state does not have same shape as its parameter: [{}] [{}]. Load "
                  "the state of this model.",
                  quote(layout.name), fmt::join(value_shape(value)->shape, ", "), fmt::join(layout.shape, ", "));
    const at::Tensor piece = to_local_range(layout, fetch(value, layout.name));
    // Without sharding the optimizer's parameter has its original shape, so its states have this shape too.
    sharded.set(name, unit.sharded() ? piece : to_logical_order(layout, piece));
  }
  return unit.member_layout(member).own().empty() ? StateDict{} : sharded;
}

StateValue fetch_local_value(const StateValue& value, const std::string&) { return value; }

const StateDict kNoStates;

// Groups the states of a dict by FSDP1 unit and by member (original parameter) of the unit, and checks them. The checks
// need only shapes and scalars, so they run on every rank before tensors are sent.
class CheckedUnitStates {
 public:
  CheckedUnitStates(const Fsdp1Units& model, const StateDict& states, bool partial_units)
      : by_unit(model.units().size()), model_(model), partial_units_(partial_units) {
    for (const auto& [key, value] : states) {
      TESSERA_CHECK(std::holds_alternative<std::string>(key), ErrorKind::kShape,
                    "[fsdp1.load] found the parameter id {} in the state, expected names. Pass what optim_state_dict "
                    "returned, or the result of rekey_optim_state_dict.",
                    to_string(key));
    }
    std::unordered_set<std::string> used;
    for (size_t i = 0; i < by_unit.size(); ++i) collect(i, states, used);
    for (const auto& parameter : model.parameters()) {
      if (parameter.unit || !parameter.find_in(states)) continue;
      used.insert(parameter.name);
      used.insert(parameter.aliases.begin(), parameter.aliases.end());
    }
    for (const auto& [key, value] : states) {
      if (!used.contains(std::get<std::string>(key))) user_keys.push_back(key);
    }
    for (size_t i = 0; i < by_unit.size(); ++i) check(i);
  }

  // Returns a description of each member's state, for check_equal_on_ranks: the ranks can exchange the states only when
  // these descriptions are equal on all ranks.
  comm::NamedValues facts() const {
    comm::NamedValues facts;
    for (size_t i = 0; i < by_unit.size(); ++i) {
      for (size_t member = 0; member < model_.units()[i].fqns.size(); ++member) {
        const auto found = by_unit[i].find(member);
        std::set<std::string> values;
        if (found == by_unit[i].end()) values.insert("no state");
        const StateDict& state = found == by_unit[i].end() ? kNoStates : found->second;
        for (const auto& [key, value] : state) {
          values.insert(fmt::format("{} {}", escape(to_string(key)), describe_value(value)));
        }
        facts.emplace_back(model_.units()[i].fqns[member], fmt::format("{}", fmt::join(values, "; ")));
      }
    }
    return facts;
  }

  std::vector<UnitStates> by_unit;
  std::vector<StateKey> user_keys;

 private:
  void collect(size_t unit_index, const StateDict& states, std::unordered_set<std::string>& used) {
    const auto& unit = model_.units()[unit_index];
    for (size_t member = 0; member < unit.fqns.size(); ++member) {
      for (const auto& name : unit.names(member)) {
        const auto* state = states.find(name);
        if (!state) continue;
        TESSERA_CHECK(state->is_dict(), ErrorKind::kShape,
                      "[fsdp1.load] {}: found {} as the state of a parameter, expected a dict", quote(name),
                      type_name(*state));
        by_unit[unit_index].try_emplace(member, state->dict());
        used.insert(name);
      }
    }
  }

  void check(size_t unit_index) const {
    const auto& unit = model_.units()[unit_index];
    const auto& states = by_unit[unit_index];
    check_unit_states(unit, states, partial_units_);
    if (states.empty() || unit.layout().use_orig_params()) return;
    const bool all_empty = std::ranges::all_of(states, [](const auto& each) { return each.second.empty(); });
    TESSERA_CHECK(!all_empty, ErrorKind::kShape,
                  "[fsdp1.load] The state of {} is empty. This should happen when use_orig_params=True. Leave its "
                  "parameters out of the dict.",
                  fmt::join(unit.fqns, ", "));
  }

  const Fsdp1Units& model_;
  bool partial_units_;
};

// Returns a copy of the state that `optimizer` (FlattenOptions::named_optimizer) has for `parameter`. The copy is used
// when this rank has no elements of the parameter, because shard_member() then returns an empty state.
StateDict own_state(const optim::Optimizer& optimizer, const std::string& parameter) {
  StateDict state;
  for (const auto& [key, tensor] : optimizer.state(parameter)) state.set(key, tensor.detach().clone());
  return state;
}

}  // namespace

StateDict flatten_optim_state(const Fsdp1Unit& unit, const UnitStates& states) {
  check_unit_states(unit, states);
  return flatten_unit(unit, states, fetch_local_value);
}

StateDict shard_orig_param_state(const Fsdp1Unit& unit, size_t member, const StateDict& state) {
  return shard_member(unit, member, state, fetch_local_value);
}

FlattenedOptimState flatten_optim_state_dict(const Fsdp1Units& model, const StateDict& optim_state_dict,
                                             const FlattenOptions& options) {
  comm::Group& group = options.group ? *options.group : *model.group();
  // An error in the checks before the exchange is thrown on all ranks. After check_equal_on_ranks all ranks have dicts
  // with equal metadata, so the exchange below calls the same collectives in the same order on each rank.
  comm::attempt_together(group, [&] {
    if (!options.rank0_only || group.rank() == 0) states_of(optim_state_dict, "[fsdp1.load]");
  });
  const StateDict tree = options.rank0_only ? broadcast_processed_state(group, optim_state_dict) : optim_state_dict;
  const StateDict& states = states_of(tree, "[fsdp1.load]");
  std::optional<CheckedUnitStates> checked;
  comm::NamedValues facts;
  comm::attempt_together(group, [&] {
    checked.emplace(model, states, options.partial_units);
    if (!options.rank0_only) facts = checked->facts();
  });
  check_equal_on_ranks(group, facts, "Pass the same optimizer state dict on all ranks, or set rank0_only.");

  const FetchValue fetch = [&](const StateValue& value, const std::string& subject) {
    return options.rank0_only ? broadcast_state(group, value, model.units()[0].handle->shard().device(), subject)
                              : value;
  };
  std::unordered_set<std::string> own_names;  // names of the parameters of a named optimizer
  if (options.named_optimizer) {
    for (auto& name : options.named_optimizer->parameter_names()) own_names.insert(std::move(name));
  }
  FlattenedOptimState flat;
  for (const auto& parameter : model.parameters()) {
    FlattenedOptimEntry entry{.parameter = parameter.name, .state = {}};
    if (!parameter.unit) {
      const auto* state = parameter.find_in(states);
      if (!state) continue;
      entry.state = clone_state(fetch(*state, parameter.name)).dict();
    } else {
      const auto& unit = model.units()[*parameter.unit];
      const auto& members = checked->by_unit[*parameter.unit];
      if (!model.use_orig_params()) {
        entry.state = flatten_unit(unit, members, fetch);
      } else if (const auto found = members.find(parameter.first_member); found != members.end()) {
        entry.state = shard_member(unit, parameter.first_member, found->second, fetch);
        if (entry.state.empty() && own_names.contains(parameter.name)) {
          entry.state = own_state(*options.named_optimizer, parameter.name);
        } else if (entry.state.empty() && options.named_optimizer) {
          log_warning("[fsdp1.load] optim_state[{}] is not on rank{}.", quote(parameter.name), group.rank());
        }
      }
      if (entry.state.empty()) continue;
    }
    flat.entries.push_back(std::move(entry));
  }
  for (const auto& key : checked->user_keys) {
    flat.user_state.set(key, clone_state(fetch(states.at(key), to_string(key))));
  }
  if (const auto* groups = tree.find("param_groups")) {
    flat.param_groups = clone_state(fetch(*groups, "param_groups")).list();
  }
  return flat;
}

}  // namespace tessera
