#include "tessera/state/fsdp1/model_state_dict.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/state/fsdp1/broadcast_state.h"
#include "tessera/state/fsdp1/placed_values.h"
#include "tessera/state/sharded_tensor.h"

namespace tessera {
namespace {

// One entry of a state dict and the memory behind it.
struct ModelTensor {
  FlatPlace place;
  std::vector<std::string> names;  // more than one: shared
  at::Tensor own;                  // 1-d, this rank's range; outside FSDP units the tensor itself
  bool managed = true;
};

struct ModelForm {
  ValueOptions values;
  bool local = false;
  bool rank0_only = false;
};

ModelForm model_form(const StateDictSettings& settings, const Fsdp1Units& model) {
  ModelForm form;
  std::visit(
      [&](const auto& config) {
        if constexpr (requires { config.offload_to_cpu; }) form.values.offload_to_cpu = config.offload_to_cpu;
        if constexpr (requires { config.rank0_only; }) form.rank0_only = config.rank0_only;
      },
      settings.state_dict_config);
  form.values.device_mesh = settings.device_mesh;
  const auto& units = model.units();
  const auto sharded = std::count_if(units.begin(), units.end(), [](const auto& unit) { return unit.sharded(); });
  if (settings.type == StateDictType::kFull || sharded == 0) {
    if (settings.type != StateDictType::kFull) {
      log_warning("[fsdp1.state_dict] {} without sharding (NO_SHARD, or a group of one rank): whole tensors",
                  to_string(settings.type));
    }
    form.values.form = form.rank0_only ? ValueForm::kWholeOnFirstRank : ValueForm::kWhole;
    return form;
  }
  form.values.form = ValueForm::kSharded;
  form.local = settings.type == StateDictType::kLocal;
  if (!form.local) return form;
  TESSERA_CHECK(!settings.device_mesh, ErrorKind::kConfig,
                "[fsdp1.state_dict] Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
                "LOCAL_STATE_DICT. Please set state_dict_type to SHARDED_STATE_DICT to get DTensor state_dict.");
  TESSERA_CHECK(sharded == static_cast<int64_t>(units.size()), ErrorKind::kConfig,
                "[fsdp1.state_dict] ``local_state_dict`` can only be used when parameters are flatten and sharded: "
                "{} of {} units are. Use SHARDED_STATE_DICT.",
                sharded, units.size());
  return form;
}

FlatPlace replicated_place(const std::string& name, const at::Tensor& tensor, const Fsdp1Units& model) {
  const auto& group = model.group();
  return {.name = name,
          .shape = tensor.sizes().vec(),
          .strides = {},
          .ranges = std::vector<FlatRange>(static_cast<size_t>(group->size()), {0, tensor.numel()}),
          .sharded = false,
          .group = group,
          .device = tensor.device()};
}

std::vector<ModelTensor> model_tensors(nn::Module& root, const Fsdp1Units& model, bool local) {
  std::vector<ModelTensor> tensors;
  for (const auto& unit : model.units()) {
    const at::Tensor shard = unit.handle->shard().detach();
    if (local) {
      auto place = unit.flat_place();
      const auto name = place.name;
      tensors.push_back({place, {name}, shard.narrow(0, 0, place.own().numel())});
      continue;
    }
    const size_t first = tensors.size();
    for (size_t member = 0; member < unit.fqns.size(); ++member) {
      tensors.push_back({unit.place(member), {unit.fqns[member]}, unit.piece(shard, member)});
    }
    for (const auto& [alias, member] : unit.aliases) tensors[first + member].names.push_back(alias);
  }
  for (const auto& [names, tensor] : unmanaged_tensors(root, model)) {
    tensors.push_back({replicated_place(names[0], tensor, model), names, tensor.detach(), false});
  }
  return tensors;
}

StateValue local_value(const ModelTensor& tensor, bool offload_to_cpu) {
  auto value = std::make_shared<ShardedTensor>();
  const auto& group = *tensor.place.group;
  value->size = tensor.place.shape;
  value->dtype = tensor.own.scalar_type();
  value->group = tensor.place.group;
  const at::Tensor own = offload_to_cpu ? tensor.own.cpu() : tensor.own;
  for (size_t rank = 0; rank < tensor.place.ranges.size(); ++rank) {
    const auto& range = tensor.place.ranges[rank];
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

// The entries of a dict, found for each tensor.
struct LoadPlan {
  std::vector<std::vector<const StateValue*>> values;  // for each tensor, by name
  IncompatibleKeys keys;
};

std::string quoted_list(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < 10; ++i) text += fmt::format("{}{}", i ? ", " : "", quote(names[i]));
  return names.size() > 10 ? text + fmt::format(" and {} more", names.size() - 10) : text;
}

void check_strict(const IncompatibleKeys& keys) {
  std::string text;
  if (!keys.missing.empty()) text += fmt::format("Missing key(s) in state_dict: {}. ", quoted_list(keys.missing));
  if (!keys.unexpected.empty()) {
    text += fmt::format("Unexpected key(s) in state_dict: {}. ", quoted_list(keys.unexpected));
  }
  TESSERA_CHECK(text.empty(), ErrorKind::kShape,
                "[fsdp1.load] {}Load the state dict of this model and state_dict_type, or set strict to false.", text);
}

LoadPlan plan_load(const std::vector<ModelTensor>& tensors, const StateDict& dict, bool strict) {
  LoadPlan plan;
  std::set<std::string> known;
  for (const auto& tensor : tensors) {
    auto& values = plan.values.emplace_back();
    for (const auto& name : tensor.names) {
      known.insert(name);
      const auto* value = dict.find(name);
      if (!value) continue;
      const auto shape = value_shape(*value);
      TESSERA_CHECK(shape, ErrorKind::kShape, "[fsdp1.load] {}: found {}, expected a tensor", quote(name),
                    type_name(*value));
      TESSERA_CHECK(shape->shape == tensor.place.shape, ErrorKind::kShape,
                    "[fsdp1.load] size mismatch for {}: copying a param with shape [{}] from checkpoint, the shape in "
                    "current model is [{}]. Load the state dict of this model and state_dict_type.",
                    quote(name), fmt::join(shape->shape, ", "), fmt::join(tensor.place.shape, ", "));
      if (value->is_sharded()) {
        for (const auto& shard : value->sharded()->local_shards) {
          TESSERA_CHECK(shard.tensor.defined() && shard.tensor.sizes() == at::IntArrayRef(shard.metadata.shard_sizes),
                        ErrorKind::kShape, "[fsdp1.load] {}: a local shard has not the shape of its metadata, [{}]",
                        quote(name), fmt::join(shard.metadata.shard_sizes, ", "));
        }
      }
      values.push_back(value);
    }
    if (values.empty()) plan.keys.missing.push_back(tensor.names[0]);
  }
  for (const auto& [key, value] : dict) {
    if (!known.contains(to_string(key))) plan.keys.unexpected.push_back(to_string(key));
  }
  if (strict) check_strict(plan.keys);
  return plan;
}

comm::Facts load_facts(const std::vector<ModelTensor>& tensors, const LoadPlan& plan) {
  comm::Facts facts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::string text;
    for (const auto* value : plan.values[i]) {
      const bool whole = !value->is_sharded() && !is_dtensor(value->tensor());
      text += (whole ? fmt::format("whole {}", c10::toString(value->tensor().scalar_type())) : describe_value(*value)) +
              "; ";
    }
    facts.emplace_back(tensors[i].names[0], text);
  }
  return facts;
}

}  // namespace

StateDict fsdp1_state_dict(nn::Module& root) {
  const c10::NoGradGuard no_grad;
  const auto model = Fsdp1Units::of(root);
  const auto settings = get_state_dict_type(root);
  comm::Group& group = *model.group();
  ModelForm form;
  std::vector<ModelTensor> tensors;
  comm::attempt_together(group, [&] {
    form = model_form(settings, model);
    tensors = model_tensors(root, model, form.local);
    const bool sharded = form.values.form == ValueForm::kSharded;
    for (const auto& tensor : tensors) {
      TESSERA_CHECK(!sharded || !tensor.managed || !tensor.place.shape.empty(), ErrorKind::kShape,
                    "[fsdp1.state_dict] {}: found a tensor without dims, expected rows to shard. Give it shape [1], or "
                    "use FULL_STATE_DICT.",
                    tensor.names[0]);
    }
  });
  check_alike(group,
              {{"state_dict_type",
                fmt::format("{} {} {} {}", to_string(settings.type), form.rank0_only, form.values.offload_to_cpu,
                            settings.device_mesh ? settings.device_mesh->to_string() : "")}},
              "Set the same state_dict_type on all ranks.");
  StateDict dict;
  for (const auto& tensor : tensors) {
    StateValue value;
    if (!tensor.managed) {
      if (form.rank0_only && group.rank() != 0) continue;
      const at::Tensor copy = tensor.own.clone();
      value = form.values.offload_to_cpu ? copy.cpu() : copy;
    } else {
      value = form.local ? local_value(tensor, form.values.offload_to_cpu)
                         : value_of_ranges(tensor.place, tensor.own, form.values);
    }
    if (form.rank0_only && group.rank() != 0) continue;
    for (const auto& name : tensor.names) dict.set(name, value);
  }
  return dict;
}

IncompatibleKeys load_fsdp1_state_dict(nn::Module& root, const StateDict& state_dict, bool strict) {
  const c10::NoGradGuard no_grad;
  const auto model = Fsdp1Units::of(root);
  const auto settings = get_state_dict_type(root);
  comm::Group& group = *model.group();
  ModelForm form;
  std::vector<ModelTensor> tensors;
  comm::attempt_together(group, [&] {
    form = model_form(settings, model);
    tensors = model_tensors(root, model, form.local);
  });
  check_alike(group, {{"state_dict_type", fmt::format("{} {}", to_string(settings.type), form.rank0_only)}},
              "Set the same state_dict_type on all ranks.");
  const StateDict tree = form.rank0_only ? broadcast_processed_state(group, state_dict) : state_dict;
  LoadPlan plan;
  comm::Facts facts;
  comm::attempt_together(group, [&] {
    plan = plan_load(tensors, tree, strict);
    if (!form.rank0_only) facts = load_facts(tensors, plan);
  });
  check_alike(group, facts, "Pass the same state dict on all ranks, or set rank0_only.");

  std::string differing;  // a shared parameter whose names have different values
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    at::Tensor first;
    for (const auto* value : plan.values[i]) {
      const auto& place = tensor.place;
      const at::Tensor piece =
          ranges_of_value(place, form.rank0_only ? broadcast_state(group, *value, place.device, place.name) : *value);
      if (!first.defined()) {
        first = piece;
        tensor.own.copy_(tensor.managed ? piece : piece.view(place.shape));
      } else if (!piece.equal(first) && differing.empty()) {
        differing = fmt::format("{}", fmt::join(tensor.names, ", "));
      }
    }
  }
  comm::attempt_together(group, [&] {
    TESSERA_CHECK(differing.empty(), ErrorKind::kShape,
                  "[fsdp1.load] {} are one parameter, and the state dict has different values for them. Load a state "
                  "dict of a model that shares it.",
                  differing);
  });
  return plan.keys;
}

}  // namespace tessera
