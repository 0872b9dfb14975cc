#include "tessera/fsdp1/state/units.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"

namespace tessera {

FlatTensorLayout FlatTensorLayout::named(const std::string& suffix) const {
  FlatTensorLayout copy = *this;
  copy.name += "." + suffix;
  return copy;
}

FlatTensorLayout replicated_layout(const std::string& name, const at::Tensor& tensor,
                                   const std::shared_ptr<comm::Group>& group) {
  return {.name = name,
          .shape = tensor.sizes().vec(),
          .strides = {},
          .ranges = std::vector<FlatRange>(static_cast<size_t>(group->size()), {0, tensor.numel()}),
          .sharded = false,
          .group = group,
          .device = tensor.device()};
}

// Computes the layout of each member (original parameter) for every rank of the group, without communication: layout()
// has the ranges of all ranks. Without sharding, the range of every rank is the whole member.
Fsdp1Unit::Fsdp1Unit(std::shared_ptr<FlatParameterHandle> of) : handle(std::move(of)) {
  const auto& group = handle->group();
  const auto ranks = static_cast<size_t>(group->size()), own = static_cast<size_t>(group->rank());
  const std::string prefix = handle->prefix();
  const c10::Device device = handle->shard().device();
  for (const auto& member : layout().members()) {
    fqns.push_back(prefix + member.fqn);
    member_layouts.push_back({.name = fqns.back(),
                              .shape = member.shape,
                              .strides = member.strides,
                              .contiguous = member.contiguous,
                              .ranges = std::vector<FlatRange>(ranks, {0, member.numel}),
                              .sharded = sharded(),
                              .group = group,
                              .device = device});
    offsets.push_back(layout().offset(fqns.size() - 1));
  }
  for (const auto& alias : layout().shared()) {
    for (size_t i = 0; i < fqns.size(); ++i) {
      if (layout().members()[i].fqn == alias.primary_fqn) aliases.emplace_back(prefix + alias.fqn, i);
    }
  }
  if (!sharded()) return;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto infos = layout().shard_param_infos(static_cast<int64_t>(rank));
    for (size_t i = 0; i < infos.size(); ++i) {
      const auto& info = infos[i];
      const bool holds = info.in_shard && info.numel_in_shard > 0;
      member_layouts[i].ranges[rank] =
          holds ? FlatRange{info.intra_param_start, info.intra_param_start + info.numel_in_shard} : FlatRange{};
      if (rank == own) offsets[i] = holds ? info.offset_in_shard : 0;
    }
  }
}

// Returns the layout of the flat parameter, with the range of elements that each rank holds. The ranges end at
// unpadded_numel(), so the padding at the end of the flat parameter belongs to no rank.
FlatTensorLayout Fsdp1Unit::flat_layout() const {
  const int64_t numel = layout().unpadded_numel(), shard = layout().sharded_numel();
  FlatTensorLayout flat{.name = handle->prefix() + "_flat_param",
                        .shape = {numel},
                        .strides = {1},
                        .ranges = {},
                        .sharded = sharded(),
                        .group = handle->group(),
                        .device = handle->shard().device()};
  for (int64_t rank = 0; rank < handle->group()->size(); ++rank) {
    const auto range = sharded() ? intersection({0, numel}, {rank * shard, (rank + 1) * shard}) : FlatRange{0, numel};
    flat.ranges.push_back(range);
  }
  return flat;
}

at::Tensor Fsdp1Unit::member_shard(const at::Tensor& shard, size_t member) const {
  return shard.narrow(0, offsets[member], member_layouts[member].own().numel());
}

std::vector<std::string> Fsdp1Unit::names(size_t member) const {
  std::vector<std::string> names = {fqns[member]};
  for (const auto& [alias, of] : aliases) {
    if (of == member) names.push_back(alias);
  }
  return names;
}

// A flat parameter has one requires_grad for all its members.
std::vector<bool> Fsdp1Unit::trained() const {
  const auto parameters = handle->parameters();
  std::vector<bool> trained;
  for (size_t member = 0; member < fqns.size(); ++member) {
    trained.push_back(parameters.at(layout().use_orig_params() ? member : 0).requires_grad());
  }
  return trained;
}

Fsdp1Units Fsdp1Units::of(nn::Module& root) {
  std::vector<std::string> names;
  for (const auto& parameter : root.named_parameters()) names.push_back(parameter.name);
  Aliases aliases;
  std::unordered_map<const void*, std::string> first;  // first name of each tensor
  for (const auto& parameter : root.named_parameters(/*all=*/true)) {
    const auto [found, is_new] = first.try_emplace(parameter.slot->parameter.unsafeGetTensorImpl(), parameter.name);
    if (!is_new) aliases.emplace_back(parameter.name, found->second);
  }
  return {flat_parameter_handles(root), names, aliases};
}

const StateValue* Fsdp1Units::Parameter::find_in(const StateDict& states) const {
  if (const auto* found = states.find(name)) return found;
  for (const auto& alias : aliases) {
    if (const auto* found = states.find(alias)) return found;
  }
  return nullptr;
}

// Makes one Parameter for each name of named_parameters(). With use_orig_params each member of a unit is a Parameter of
// its own; otherwise all members of a unit are one Parameter with several FQNs. A Parameter without a unit is outside
// all units. Aliases are added to by_fqn_ last and never replace an FQN.
Fsdp1Units::Fsdp1Units(const std::vector<std::shared_ptr<FlatParameterHandle>>& handles,
                       const std::vector<std::string>& names, const Aliases& aliases) {
  TESSERA_CHECK(!handles.empty(), ErrorKind::kConfig,
                "[fsdp1.state] no module of this model is wrapped by FSDP1. Call wrap_fsdp1 first.");
  // For each name: the unit and the index of the parameter in it.
  std::unordered_map<std::string, std::pair<size_t, size_t>> managed;
  for (const auto& handle : handles) {
    const Fsdp1Unit& unit = units_.emplace_back(handle);
    TESSERA_CHECK(unit.layout().use_orig_params() == use_orig_params(), ErrorKind::kConfig,
                  "[fsdp1.state] Not all FSDP modules have the same _use_orig_params value: {} has {}, {} has {}. Wrap "
                  "all with one.",
                  units_[0].fqns[0], use_orig_params(), unit.fqns[0], unit.layout().use_orig_params());
    TESSERA_CHECK(handle->group()->ranks() == group()->ranks(), ErrorKind::kConfig,
                  "[fsdp1.state] {} is sharded over ranks {}, {} over ranks {}. Wrap all modules over one group.",
                  units_[0].fqns[0], fmt::join(group()->ranks(), ","), unit.fqns[0],
                  fmt::join(handle->group()->ranks(), ","));
    const auto shown = handle->parameter_names();
    for (size_t i = 0; i < shown.size(); ++i) managed[shown[i]] = {units_.size() - 1, i};
  }
  for (const auto& name : names) {
    Parameter parameter{.name = name, .fqns = {name}, .unit = std::nullopt};
    if (const auto found = managed.find(name); found != managed.end()) {
      const auto& unit = units_[found->second.first];
      parameter.unit = found->second.first;
      parameter.first_member = use_orig_params() ? found->second.second : 0;
      parameter.fqns = use_orig_params() ? std::vector<std::string>{unit.fqns.at(parameter.first_member)} : unit.fqns;
    }
    by_name_[name] = parameters_.size();
    for (const auto& fqn : parameter.fqns) by_fqn_[fqn] = parameters_.size();
    parameters_.push_back(std::move(parameter));
  }
  for (const auto& [alias, name] : aliases) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end() || parameters_[found->second].unit) continue;
    parameters_[found->second].aliases.push_back(alias);
    by_fqn_.try_emplace(alias, found->second);
  }
  for (const auto& unit : units_) {
    for (const auto& [alias, member] : unit.aliases) {
      if (const auto found = by_fqn_.find(unit.fqns[member]); found != by_fqn_.end()) {
        by_fqn_.try_emplace(alias, found->second);
      }
    }
  }
}

const Fsdp1Units::Parameter* Fsdp1Units::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &parameters_[found->second];
}

const Fsdp1Units::Parameter* Fsdp1Units::find_fqn(const std::string& fqn) const {
  const auto found = by_fqn_.find(fqn);
  return found == by_fqn_.end() ? nullptr : &parameters_[found->second];
}

// Parameters are found by their tensors, so a shared parameter is listed once with all its names. Buffers are listed
// once per name.
std::vector<UnmanagedTensor> unmanaged_tensors(nn::Module& root, const Fsdp1Units& model) {
  std::vector<UnmanagedTensor> tensors;
  // Maps each parameter tensor to its index in `tensors`, or to nullopt if an FSDP1 unit holds the parameter.
  std::unordered_map<const void*, std::optional<size_t>> found;
  for (const auto& parameter : root.named_parameters(/*all=*/true)) {
    const at::Tensor& tensor = parameter.slot->parameter;
    const auto [entry, is_new] = found.try_emplace(tensor.unsafeGetTensorImpl());
    const auto* known = model.find(parameter.name);
    if (is_new && known && !known->unit) {
      entry->second = tensors.size();
      tensors.push_back({.names = {}, .tensor = tensor});
    }
    if (entry->second) tensors[*entry->second].names.push_back(parameter.name);
  }
  for (const auto& [path, module] : root.named_modules()) {
    for (const auto& buffer : module->own_buffers()) {
      if (!buffer.persistent || !buffer.slot->defined()) continue;
      tensors.push_back({.names = {path.empty() ? buffer.name : path + "." + buffer.name},
                         .tensor = *buffer.slot,
                         .is_parameter = false,
                         .saved_dtype = saved_buffer_dtype(root, *buffer.slot)});
    }
  }
  return tensors;
}

}  // namespace tessera
