#include "tessera/fsdp1/state/saved_states.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/state_message.h"

namespace tessera {
namespace {

using SavedParameter = Fsdp1Units::Parameter;

// Returns the number of elements that this rank's state tensors of a parameter have.
int64_t local_numel(const Fsdp1Units& model, const SavedParameter& parameter) {
  const auto& unit = model.units()[*parameter.unit];
  if (model.use_orig_params()) return unit.member_layout(parameter.first_member).own().numel();
  return unit.sharded() ? unit.layout().sharded_numel() : unit.layout().unpadded_numel();
}

// Whether the rank has elements of the parameter. A parameter without any elements counts as present on every rank.
bool holds(const Fsdp1Units& model, const SavedParameter& parameter, size_t rank) {
  const auto& unit = model.units()[*parameter.unit];
  if (!model.use_orig_params()) return true;
  const auto& layout = unit.member_layout(parameter.first_member);
  return layout.numel() == 0 || !layout.ranges[rank].empty();
}

void check_local_state(const Fsdp1Units& model, const SavedParameter& parameter, const StateDict& state) {
  const int64_t numel = local_numel(model, parameter);
  for (size_t i = 0; i < parameter.fqns.size(); ++i) {
    const auto& layout = model.units()[*parameter.unit].member_layout(parameter.first_member + i);
    TESSERA_CHECK(state.empty() || !layout.shape.empty(), ErrorKind::kShape,
                  "[fsdp1.save] {}: Flattening a zero-dimension parameter is not supported. Give it shape [1].",
                  layout.name);
  }
  for (const auto& [key, value] : state) {
    TESSERA_CHECK(std::holds_alternative<std::string>(key), ErrorKind::kShape,
                  "[fsdp1.save] {}: found a state named by the number {}, expected text", parameter.name,
                  to_string(key));
    if (!value.is_tensor() && !value.is_sharded()) continue;
    const bool plain = value.is_tensor() && value.tensor().defined() && !is_dtensor(value.tensor());
    TESSERA_CHECK(
        plain, ErrorKind::kShape,
        "[fsdp1.save] {} of {}: found a {}, expected this rank's part as a plain tensor. Pass the optimizer's "
        "own state dict.",
        quote(to_string(key)), parameter.name, type_name(value));
    const auto& tensor = value.tensor();
    TESSERA_CHECK(
        tensor.dim() == 0 || tensor.numel() == numel, ErrorKind::kShape,
        "[fsdp1.save] {} of {}: found shape {}, expected the {} elements that this rank has of the parameter. "
        "Pass the state of this model's optimizer.",
        quote(to_string(key)), parameter.name, fmt::join(tensor.sizes(), "x"), numel);
  }
}

std::string fqn_tuple(const std::vector<std::string>& fqns) {
  std::string text;
  for (const auto& fqn : fqns) text += fmt::format("{}'{}'", text.empty() ? "" : ", ", fqn);
  return fmt::format("({}{})", text, fqns.size() == 1 ? "," : "");
}

const SavedParameter& parameter_of_peer(const Fsdp1Units& model, const StateKey& key) {
  const auto* parameter = model.find(to_string(key));
  TESSERA_CHECK(parameter, ErrorKind::kShape,
                "[fsdp1.save] another rank has state of {}, which this rank's model does not have. Build and wrap the "
                "same model on all ranks.",
                quote(to_string(key)));
  return *parameter;
}

// For each rank: the state of each parameter by name, with meta tensors in place of tensors with dims, and None for
// parameters outside FSDP units.
using RankStateMetadata = std::vector<StateDict>;

RankStateMetadata all_gather_state_metadata(const LocalOptimStates& local, comm::Group& group) {
  std::string packed;
  comm::attempt_together(group, [&] {
    StateDict own;
    for (const auto& [parameter, state] : local.entries) {
      own.set(parameter->name, parameter->unit ? StateValue(*state) : StateValue());
    }
    packed = encode_state(own, TensorsInMessage::kShapes);
  });
  RankStateMetadata all;
  for (const auto& bytes : comm::all_gather_bytes(group, packed)) all.push_back(decode_state(bytes).dict());
  return all;
}

// Every rank has a shard of every flat parameter, so every rank must have states for the same parameters as rank 0.
void check_keys_of_rank0(const Fsdp1Units& model, const RankStateMetadata& all, const comm::Group& group) {
  std::string missing, unexpected;
  for (size_t rank = 1; rank < all.size(); ++rank) {
    std::vector<std::string> lacks, has;
    for (const auto& [key, state] : all[0]) {
      if (!all[rank].contains(key)) lacks.push_back(fqn_tuple(parameter_of_peer(model, key).fqns));
    }
    for (const auto& [key, state] : all[rank]) {
      if (!all[0].contains(key) && state.is_dict()) has.push_back(fqn_tuple(parameter_of_peer(model, key).fqns));
    }
    const int global = group.ranks()[rank];
    if (!lacks.empty()) {
      missing += fmt::format("\nRank {} is missing states for the parameters: [{}]", global, fmt::join(lacks, ", "));
    }
    if (!has.empty()) unexpected += fmt::format("\nOnly rank {} has: [{}]", global, fmt::join(has, ", "));
  }
  TESSERA_CHECK(
      missing.empty(), ErrorKind::kShape,
      "[fsdp1.save] FSDP currently requires each rank to have at least the optimizer states needed by rank 0's "
      "optimizer but some ranks are missing some of those states{}",
      missing);
  TESSERA_CHECK(
      unexpected.empty(), ErrorKind::kShape,
      "[fsdp1.save] some ranks have optimizer states that rank {} does not have; these states would be lost{}",
      group.ranks()[0], unexpected);
}

// Merges the ranks' states of one parameter. The first rank with elements and state is the reference; every other rank
// with elements must have the same names, dtypes and scalars. Ranks without elements are ignored. `all` is the result
// of all_gather_state_metadata(), which is equal on all ranks, so all ranks throw or none does.
MergedOptimState merge_parameter_state(const Fsdp1Units& model, const SavedParameter& parameter,
                                       const RankStateMetadata& all, const comm::Group& group) {
  MergedOptimState merged;
  std::map<std::string, StateValue> scalars, others;
  const StateDict* reference = nullptr;
  size_t reference_rank = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto* found = all[rank].find(parameter.name);
    if (reference || !found || !holds(model, parameter, rank)) continue;
    reference = &found->dict();
    reference_rank = rank;
  }
  if (!reference) return merged;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!holds(model, parameter, rank)) continue;
    const auto* found = all[rank].find(parameter.name);
    TESSERA_CHECK(found, ErrorKind::kShape,
                  "[fsdp1.save] rank {} has elements of {} but no state of it, while rank {} has. Step the optimizer "
                  "on all ranks.",
                  group.ranks()[rank], parameter.name, group.ranks()[reference_rank]);
    const auto& state = found->dict();
    const auto differ = [&](const std::string& name, const std::string& mine, const std::string& other) {
      raise(ErrorKind::kShape, "[fsdp1.save] {}: Rank {} has different values for {}: {}. Other ranks: {}.",
            parameter.name, group.ranks()[rank], name, mine, other);
    };
    for (const auto& [key, value] : *reference) {
      const auto name = to_string(key);
      const auto* own = state.find(key);
      if (!own) differ(name, "nothing", describe_value(value));
      const auto shape = value_shape(*own), expected = value_shape(value);
      const bool has_dims = shape && !shape->shape.empty(), wants_dims = expected && !expected->shape.empty();
      if (has_dims != wants_dims || (has_dims && shape->dtype != expected->dtype)) {
        differ(name, describe_value(*own), describe_value(value));
      }
      if (!has_dims &&
          encode_state(*own, TensorsInMessage::kShapes) != encode_state(value, TensorsInMessage::kShapes)) {
        differ(name, describe_value(*own), describe_value(value));
      }
      if (has_dims) {
        merged.tensors[name] = shape->dtype;
      } else {
        (shape ? scalars : others)[name] = value;
      }
    }
    for (const auto& [key, value] : state) {
      if (!reference->contains(key)) differ(to_string(key), describe_value(value), "nothing");
    }
  }
  for (auto& [name, value] : scalars) merged.others.set(name, value);
  for (auto& [name, value] : others) merged.others.set(name, value);
  return merged;
}

// Throws for a trained member that has no state on any rank although other members of its unit have state.
void check_unit_complete(const Fsdp1Units& model, const std::set<std::string>& have) {
  for (const auto& unit : model.units()) {
    const auto has = [&](const std::string& fqn) { return have.contains(fqn); };
    if (std::ranges::none_of(unit.fqns, has)) continue;
    const auto trained = unit.trained();
    for (size_t member = 0; member < unit.fqns.size(); ++member) {
      if (has(unit.fqns[member]) || !trained[member] || unit.member_layout(member).numel() == 0) continue;
      std::vector<std::string> with_state;
      std::copy_if(unit.fqns.begin(), unit.fqns.end(), std::back_inserter(with_state), has);
      raise(ErrorKind::kShape,
            "[fsdp1.save] {} is not in the optimizer state. The FSDPParamInfo has the param keys [{}] while the "
            "optimizer has the param keys [{}]. Train all parameters of a unit, or freeze those that are not.",
            unit.fqns[member], fmt::join(unit.fqns, ", "), fmt::join(with_state, ", "));
    }
  }
}

}  // namespace

const StateDict& states_of(const StateDict& optim_state_dict, const char* where) {
  const auto* states = optim_state_dict.find("state");
  TESSERA_CHECK(states && states->is_dict(), ErrorKind::kShape,
                "{} `optim_state_dict` must have the keys \"state\"to be a valid optimizer state dict. Pass what "
                "optim_state_dict or optimizer_state_dict returned.",
                where);
  return states->dict();
}

LocalOptimStates find_local_optim_states(const Fsdp1Units& model, const std::vector<std::string>& optimizer_parameters,
                                         const StateDict& saved) {
  LocalOptimStates local;
  const auto& dict = states_of(saved, "[fsdp1.save]");
  // The dict of a named optimizer has no ids. In a dict with ids, keys that are text are user-defined state.
  const bool named =
      std::ranges::none_of(dict, [](const auto& item) { return std::holds_alternative<int64_t>(item.first); });
  std::map<int64_t, std::pair<const SavedParameter*, const StateDict*>> by_id;
  for (const auto& [key, value] : dict) {
    const SavedParameter* parameter = nullptr;
    int64_t id = static_cast<int64_t>(by_id.size());
    if (const auto* number = std::get_if<int64_t>(&key)) {
      TESSERA_CHECK(*number >= 0 && *number < static_cast<int64_t>(optimizer_parameters.size()), ErrorKind::kShape,
                    "[fsdp1.save] the state has an entry for parameter {}, the optimizer has {} parameters. Pass the "
                    "state of this optimizer.",
                    *number, optimizer_parameters.size());
      id = *number;
      parameter = model.find(optimizer_parameters[static_cast<size_t>(id)]);
      TESSERA_CHECK(
          parameter, ErrorKind::kShape,
          "[fsdp1.save] the optimizer's parameter {} is not in the model. Make the optimizer from this model.",
          quote(optimizer_parameters[static_cast<size_t>(id)]));
    } else if (named) {
      parameter = model.find(std::get<std::string>(key));
    }
    if (!parameter) {
      local.user_keys.push_back(key);
      continue;
    }
    TESSERA_CHECK(value.is_dict(), ErrorKind::kShape,
                  "[fsdp1.save] {}: found {} as the state of a parameter, expected a dict", parameter->name,
                  type_name(value));
    if (parameter->unit) check_local_state(model, *parameter, value.dict());
    by_id[id] = {parameter, &value.dict()};
  }
  for (const auto& [id, entry] : by_id) {
    local.entries.push_back(entry);
    local.by_parameter[entry.first] = entry.second;  // the last one, as in all_gather_state_metadata
  }
  return local;
}

MergedOptimStates merge_states_of_ranks(const Fsdp1Units& model, const LocalOptimStates& local, comm::Group& group) {
  const auto all = all_gather_state_metadata(local, group);
  MergedOptimStates merged;
  // The parameters in the result must have the same order on all ranks. With use_orig_params a rank has state only for
  // parameters with elements on it, so the parameters of all ranks are united and sorted by name. Flat parameters have
  // state on all ranks, so rank 0's order is used.
  if (model.use_orig_params()) {
    std::map<std::string, const SavedParameter*> sorted;
    for (const auto& summary : all) {
      for (const auto& [key, state] : summary) {
        const auto& parameter = parameter_of_peer(model, key);
        sorted[parameter.fqns[0]] = &parameter;
      }
    }
    for (const auto& [fqn, parameter] : sorted) merged.parameters.push_back(parameter);
  } else {
    check_keys_of_rank0(model, all, group);
    for (const auto& [key, state] : all[0]) merged.parameters.push_back(&parameter_of_peer(model, key));
    for (const auto& [parameter, state] : local.entries) {
      if (!parameter->unit && !all[0].contains(parameter->name)) merged.parameters.push_back(parameter);
    }
  }
  std::set<std::string> have;
  for (const auto* parameter : merged.parameters) {
    if (!parameter->unit) continue;
    merged.states[parameter] = merge_parameter_state(model, *parameter, all, group);
    have.insert(parameter->fqns.begin(), parameter->fqns.end());
  }
  if (model.use_orig_params()) check_unit_complete(model, have);
  return merged;
}

at::Tensor local_state_range(const Fsdp1Units& model, const Fsdp1Units::Parameter& parameter, size_t index,
                             const StateDict* state, const std::string& name, c10::ScalarType dtype) {
  const auto& unit = model.units()[*parameter.unit];
  const auto& layout = unit.member_layout(parameter.first_member + index);
  const auto* value = state ? state->find(name) : nullptr;
  if (!value || layout.own().empty()) return at::empty({0}, at::TensorOptions().dtype(dtype).device(layout.device));
  const at::Tensor tensor = value->tensor().detach().to(layout.device);
  // Without use_orig_params, `state` belongs to a flat parameter, and its tensors have the layout of this rank's shard
  // of the flat parameter. So the elements of original parameter `index` are at the same offset as in the shard. With
  // use_orig_params, `state` belongs to the original parameter itself, and its tensors hold only the elements of that
  // parameter that this rank has; if the unit is not sharded, they have the parameter's shape.
  if (!model.use_orig_params()) return unit.member_shard(tensor.reshape({-1}), index);
  return tensor.sizes() == at::IntArrayRef(layout.shape) ? to_storage_order(layout, tensor) : tensor.reshape({-1});
}

}  // namespace tessera
