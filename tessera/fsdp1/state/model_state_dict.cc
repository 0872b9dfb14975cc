#include "tessera/fsdp1/state/model_state_dict.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/broadcast_state.h"
#include "tessera/state/model_names.h"
#include "tessera/state/sharded_tensor.h"

namespace tessera {
namespace {

// One tensor of the model's state dict, and this rank's elements of it.
struct StateDictTensor {
  FlatTensorLayout layout;
  std::vector<std::string> names;  // more than one for a shared parameter
  at::Tensor own;                  // this rank's range, 1-d; for a tensor outside FSDP units the tensor itself
  bool managed = true;
  bool frozen = false;                                       // a parameter that needs no gradient
  c10::ScalarType saved_dtype = c10::ScalarType::Undefined;  // see UnmanagedTensor
};

// Whether each value is a rank's flat shard (LOCAL_STATE_DICT with sharded units).
bool is_local(const StateDictForm& form) {
  return form.type == StateDictType::kLocal && form.values.form == ValueForm::kSharded;
}

StateDictForm model_form(const StateDictSettings& settings, const Fsdp1Units& model) {
  const auto form = state_dict_form(settings, settings.state_dict_config, model, "[fsdp1.state_dict]");
  if (!is_local(form)) return form;
  TESSERA_CHECK(!settings.device_mesh, ErrorKind::kConfig,
                "[fsdp1.state_dict] Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
                "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict.");
  const auto sharded = std::ranges::count_if(model.units(), &Fsdp1Unit::sharded);
  TESSERA_CHECK(sharded == static_cast<int64_t>(model.units().size()), ErrorKind::kConfig,
                "[fsdp1.state_dict] ``local_state_dict`` can only be used when parameters are flatten and sharded: "
                "{} of {} units are. Use SHARDED_STATE_DICT.",
                sharded, model.units().size());
  return form;
}

// Lists the tensors of the state dict in an order that is the same on all ranks: the members of each unit (or its flat
// parameter, with `local`), then the tensors outside units.
std::vector<StateDictTensor> model_tensors(nn::Module& root, const Fsdp1Units& model, bool local) {
  std::vector<StateDictTensor> tensors;
  for (const auto& unit : model.units()) {
    const at::Tensor shard = unit.handle->shard().detach();
    const auto trained = unit.trained();
    if (local) {
      auto layout = unit.flat_layout();
      const auto name = layout.name;
      const bool frozen = std::ranges::find(trained, true) == trained.end();
      tensors.push_back({layout, {name}, shard.narrow(0, 0, layout.own().numel()), true, frozen});
      continue;
    }
    const size_t first = tensors.size();
    for (size_t member = 0; member < unit.fqns.size(); ++member) {
      tensors.push_back(
          {unit.member_layout(member), {unit.fqns[member]}, unit.member_shard(shard, member), true, !trained[member]});
    }
    for (const auto& [alias, member] : unit.aliases) tensors[first + member].names.push_back(alias);
  }
  for (const auto& [names, tensor, is_parameter, saved_dtype] : unmanaged_tensors(root, model)) {
    const bool frozen = is_parameter && !tensor.requires_grad();
    tensors.push_back(
        {replicated_layout(names[0], tensor, model.group()), names, tensor.detach(), false, frozen, saved_dtype});
  }
  return tensors;
}

// A ShardedTensor whose local shard is this rank's range of the flat parameter. The metadata of all ranks follow from
// the layout, so nothing is sent.
StateValue local_value(const StateDictTensor& tensor, bool offload_to_cpu) {
  auto value = std::make_shared<ShardedTensor>();
  const auto& group = *tensor.layout.group;
  value->size = tensor.layout.shape;
  value->dtype = tensor.own.scalar_type();
  value->group = tensor.layout.group;
  const at::Tensor own = offload_to_cpu ? tensor.own.cpu() : tensor.own;
  for (size_t rank = 0; rank < tensor.layout.ranges.size(); ++rank) {
    const auto& range = tensor.layout.ranges[rank];
    if (range.empty()) continue;
    const std::string device = own.is_cpu() ? "cpu" : own.device().str();
    value->shards_metadata.push_back({.shard_offsets = {range.begin},
                                      .shard_sizes = {range.numel()},
                                      .placement = fmt::format("rank:{}/{}", group.ranks()[rank], device)});
    if (rank == static_cast<size_t>(group.rank())) {
      value->local_shards.push_back({own.clone(), value->shards_metadata.back()});
    }
  }
  return value;
}

// For each tensor of the model, the values that the loaded dict has under the names of the tensor.
struct MatchedValues {
  std::vector<std::vector<const StateValue*>> values;  // for each tensor, its values in the order of its names
  IncompatibleKeys keys;
};

void check_strict(const IncompatibleKeys& keys) {
  std::string text;
  if (!keys.missing_keys.empty()) {
    text += fmt::format("Missing key(s) in state_dict: {}. ", quoted_list(keys.missing_keys));
  }
  if (!keys.unexpected_keys.empty()) {
    text += fmt::format("Unexpected key(s) in state_dict: {}. ", quoted_list(keys.unexpected_keys));
  }
  TESSERA_CHECK(text.empty(), ErrorKind::kShape,
                "[fsdp1.load] {}Load the state dict of this model and state_dict_type, or set strict to false.", text);
}

void check_loaded_value(const StateDictTensor& tensor, const std::string& name, const StateValue& value) {
  const auto shape = value_shape(value);
  TESSERA_CHECK(shape, ErrorKind::kShape, "[fsdp1.load] {}: found {}, expected a tensor", quote(name),
                type_name(value));
  TESSERA_CHECK(shape->shape == tensor.layout.shape, ErrorKind::kShape,
                "[fsdp1.load] size mismatch for {}: copying a param with shape [{}] from checkpoint, the shape in "
                "current model is [{}]. Load the state dict of this model and state_dict_type.",
                quote(name), fmt::join(shape->shape, ", "), fmt::join(tensor.layout.shape, ", "));
  check_local_shards(name, value);
}

MatchedValues match_values(const std::vector<StateDictTensor>& tensors, const StateDict& dict,
                           const Fsdp1LoadOptions& options) {
  const auto values_by_name = values_by_clean_fqn(dict, "[fsdp1.load]");
  MatchedValues matched;
  std::unordered_set<std::string> known;
  for (const auto& tensor : tensors) {
    auto& values = matched.values.emplace_back();
    for (const auto& name : tensor.names) {
      known.insert(name);
      const auto found = values_by_name.find(name);
      if (found == values_by_name.end()) continue;
      check_loaded_value(tensor, name, *found->second);
      values.push_back(found->second);
    }
    const bool may_miss = options.ignore_frozen_params && tensor.frozen;
    if (values.empty() && !may_miss) matched.keys.missing_keys.push_back(tensor.names[0]);
  }
  for (const auto& [key, value] : dict) {
    if (!known.contains(clean_fqn(to_string(key)))) matched.keys.unexpected_keys.push_back(to_string(key));
  }
  if (options.strict) check_strict(matched.keys);
  return matched;
}

// Describes the values of the dict for the comparison between ranks. All ranks must have whole values of the same
// dtypes (the contents are not compared), and sharded values with equal metadata, because their exchange is planned
// from the metadata.
comm::NamedValues load_facts(const std::vector<StateDictTensor>& tensors, const MatchedValues& matched) {
  comm::NamedValues facts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::string text;
    for (const auto* value : matched.values[i]) {
      const bool whole = !value->is_sharded() && !is_dtensor(value->tensor());
      text += (whole ? fmt::format("whole {}", c10::toString(value->tensor().scalar_type())) : describe_value(*value)) +
              "; ";
    }
    facts.emplace_back(tensors[i].names[0], text);
  }
  return facts;
}

// Whether both values have equal bits in the model's dtype. Unlike with ==, a NaN equals itself, and 0 differs from -0.
bool same_bits(const at::Tensor& a, const at::Tensor& b, c10::ScalarType dtype) {
  return a.to(dtype).view(at::kByte).equal(b.to(dtype).view(at::kByte));
}

// For the present state_dict_type of the model: the form of the values in the model's state dict, and the tensors that
// belong into this dict.
struct ModelStateDictPlan {
  StateDictForm form;
  std::vector<StateDictTensor> tensors;

  ModelStateDictPlan(nn::Module& root, const Fsdp1Units& model)
      : form(model_form(get_state_dict_type(root), model)), tensors(model_tensors(root, model, is_local(form))) {}
};

}  // namespace

StateDict fsdp1_state_dict(nn::Module& root, bool ignore_frozen_params) {
  const c10::NoGradGuard no_grad;
  const auto model = Fsdp1Units::of(root);
  comm::Group& group = *model.group();
  std::optional<ModelStateDictPlan> plan;
  comm::attempt_together(group, [&] {
    plan.emplace(root, model);
    const bool sharded = plan->form.values.form == ValueForm::kSharded;
    for (const auto& tensor : plan->tensors) {
      TESSERA_CHECK(!sharded || !tensor.managed || !tensor.layout.shape.empty(), ErrorKind::kShape,
                    "[fsdp1.state_dict] {}: found a tensor without dims, expected rows to shard. Give it shape [1], or "
                    "use FULL_STATE_DICT.",
                    tensor.names[0]);
    }
  });
  const auto& [form, tensors] = *plan;
  check_same_form(group, form);
  const bool local = is_local(form);
  StateDict dict;
  // The collectives of to_state_dict_value run for every managed tensor on every rank; only after them does a rank that
  // gets no result drop the value.
  for (const auto& tensor : tensors) {
    StateValue value;
    if (!tensor.managed) {
      if (form.rank0_only && group.rank() != 0) continue;
      const bool as_it_is = local || tensor.saved_dtype == c10::ScalarType::Undefined;
      const at::Tensor copy = as_it_is ? tensor.own.clone() : tensor.own.to(tensor.saved_dtype, false, /*copy=*/true);
      value = form.values.offload_to_cpu ? copy.cpu() : copy;
    } else {
      value = local ? local_value(tensor, form.values.offload_to_cpu)
                    : to_state_dict_value(tensor.layout, tensor.own, form.values);
    }
    if ((form.rank0_only && group.rank() != 0) || (ignore_frozen_params && tensor.frozen)) continue;
    for (const auto& name : tensor.names) dict.set(name, value);
  }
  return dict;
}

IncompatibleKeys load_fsdp1_state_dict(nn::Module& root, const StateDict& state_dict, const Fsdp1LoadOptions& options) {
  const c10::NoGradGuard no_grad;
  const auto model = Fsdp1Units::of(root);
  comm::Group& group = *model.group();
  std::optional<ModelStateDictPlan> plan;
  comm::attempt_together(group, [&] { plan.emplace(root, model); });
  const auto& form = plan->form;
  auto& tensors = plan->tensors;
  check_equal_on_ranks(group, {{"state_dict_type", fmt::format("{} {}", to_string(form.type), form.rank0_only)}},
                       "Set the same state_dict_type on all ranks.");
  // All ranks first match and check the values of the dict. Only then are tensors exchanged, in the same order on all
  // ranks. With rank0_only the ranks receive the tensors from rank 0, one at a time.
  const StateDict tree = form.rank0_only ? broadcast_processed_state(group, state_dict) : state_dict;
  MatchedValues matched;
  comm::NamedValues facts;
  comm::attempt_together(group, [&] {
    matched = match_values(tensors, tree, options);
    if (!form.rank0_only) facts = load_facts(tensors, matched);
  });
  check_equal_on_ranks(group, facts, "Pass the same state dict on all ranks, or set rank0_only.");

  const auto piece_of = [&](const FlatTensorLayout& layout, const StateValue& value) {
    return to_local_range(layout, form.rank0_only ? broadcast_state(group, value, layout.device, layout.name) : value);
  };
  std::string differing;  // names of the first shared parameter whose names have different values
  // Shared parameters are compared before anything is written. Each rank compares its own ranges, and attempt_together
  // makes a difference on one rank an error on all ranks.
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& values = matched.values[i];
    if (values.size() < 2) continue;
    const at::Tensor first = piece_of(tensors[i].layout, *values[0]);
    for (size_t other = 1; other < values.size(); ++other) {
      const at::Tensor piece = piece_of(tensors[i].layout, *values[other]);
      if (differing.empty() && !same_bits(first, piece, tensors[i].own.scalar_type())) {
        differing = fmt::format("{}", fmt::join(tensors[i].names, ", "));
      }
    }
  }
  comm::attempt_together(group, [&] {
    TESSERA_CHECK(differing.empty(), ErrorKind::kShape,
                  "[fsdp1.load] {} are one parameter, and the state dict has different values for them. Load a state "
                  "dict of a model that shares it.",
                  differing);
  });
  // This loop calls piece_of() for the first value of a shared parameter again, although the loop that compared the
  // values has called it before. Keeping that result would need memory for all shared parameters.
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (matched.values[i].empty()) continue;
    const auto& [layout, names, own, managed, frozen, saved_dtype] = tensors[i];
    const at::Tensor piece = piece_of(layout, *matched.values[i][0]);
    own.copy_(managed ? piece : piece.view(layout.shape));
  }
  return matched.keys;
}

}  // namespace tessera
