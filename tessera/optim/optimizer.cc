#include "tessera/optim/optimizer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <tuple>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/optim/detail/chunks.h"
#include "tessera/optim/detail/hyperparameters.h"
#include "tessera/optim/detail/stochastic_rounding.h"
#include "tessera/optim/quantized_moments.h"

namespace tessera::optim {
namespace {

constexpr const char* kMaster = "master";

bool is_narrow(const at::Tensor& tensor) { return tensor.is_floating_point() && tensor.itemsize() < 4; }

// Returns the version counter of a tensor, which grows with every in-place write that autograd counts.
uint64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }
uint64_t version_of(const at::Tensor& parameter, const at::Tensor& local) {
  return parameter.is_inference() || local.is_inference() ? 0 : version_of(parameter) + version_of(local);
}

// Converts tensors to float32; tensors that are already float32 are returned unchanged.
std::vector<at::Tensor> in_float32(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> out, narrow, wide;
  for (const auto& each : tensors) {
    out.push_back(each);
    if (each.scalar_type() == at::kFloat) continue;
    narrow.push_back(each);
    wide.push_back(out.back() = at::empty_like(each, each.options().dtype(at::kFloat)));
  }
  if (!wide.empty()) at::_foreach_copy_(wide, narrow);
  return out;
}

}  // namespace

Optimizer::Optimizer(nn::Module& module, double lr, const std::vector<Hyperparameters>& kinds,
                     const std::vector<ParameterGroup>& groups, const Precision& precision, const UpdateKinds& choice)
    : lr_(lr), precision_(precision), kind_setting_(choice.setting) {
  TESSERA_CHECK(!precision.stochastic_rounding || !precision.master_weights, ErrorKind::kConfig,
                "[optim.make] found stochastic_rounding with master_weights, wanted one of the two: a master copy is "
                "rounded to the nearest. Set master_weights to false.");
  for (const auto& settings : kinds) {
    const double weight_decay = detail::number_of(settings, "weight_decay");
    TESSERA_CHECK(lr >= 0 && weight_decay >= 0, ErrorKind::kConfig,
                  "[optim.make] found lr {} and weight decay {}, wanted none below 0", lr, weight_decay);
  }
  c10::NoGradGuard no_grad;
  std::vector<size_t> kind_of_entry;
  for (const auto& named : module.named_parameters()) {
    const at::Tensor& parameter = named.slot->parameter;
    TESSERA_CHECK(!parameter.is_meta(), ErrorKind::kShape,
                  "[optim.make] {}: found a parameter on the meta device, wanted one with values. Call "
                  "to_empty(module, device) and load it first.",
                  named.name);
    TESSERA_CHECK(!precision.stochastic_rounding || parameter.scalar_type() != at::kHalf, ErrorKind::kConfig,
                  "[optim.make] {}: found stochastic_rounding for float16, wanted a parameter in bfloat16 or wider",
                  named.name);
    ParameterEntry entry;
    entry.name = named.name;
    entry.slot = named.slot;
    entry.parameter = parameter;
    entry.local = local_tensor_of(parameter).detach();
    // The step count is on the parameter's device, because fused kernels read it there.
    entry.step = at::zeros({}, entry.local.options().dtype(at::kFloat));
    position_[entry.name] = entries_.size();
    entries_.push_back(std::move(entry));
    kind_of_entry.push_back(choice.kind_of ? choice.kind_of(named) : 0);
  }
  make_groups(kinds, kind_of_entry, groups);
}

namespace {

// Replaces the default settings of a kind (UpdateKinds) by the group's own settings. Settings that the kind does not
// have are ignored: they are for parameters of another kind.
Hyperparameters with_own_settings(Hyperparameters settings, const ParameterGroup& group) {
  for (const auto& [name, value] : group.settings) {
    if (detail::find_hyperparameter(settings, name)) detail::set_hyperparameter(settings, name, value);
  }
  return settings;
}

}  // namespace

// If the parameters of one entry of `groups` are of two kinds (UpdateKinds), the entry becomes two parameter groups,
// because each kind has other settings. Parameters that no entry names form further groups, which come after the groups
// of all entries.
void Optimizer::make_groups(const std::vector<Hyperparameters>& kinds, const std::vector<size_t>& kind_of_entry,
                            const std::vector<ParameterGroup>& groups) {
  const auto add = [&](Hyperparameters settings, double lr_factor, double decay) {
    TESSERA_CHECK(lr_factor >= 0 && decay >= 0, ErrorKind::kConfig,
                  "[optim.make] parameter group: found lr_factor {} and weight decay {}, wanted none below 0",
                  lr_factor, decay);
    detail::set_hyperparameter(settings, "weight_decay", decay);
    groups_.push_back({.lr = lr_ * lr_factor,
                       .lr_factor = lr_factor,
                       .settings = std::move(settings),
                       .state_names = {},
                       .entries = {}});
    return groups_.size() - 1;
  };
  std::vector<bool> grouped(entries_.size());
  for (const auto& group : groups) {
    std::map<size_t, size_t> by_kind;
    if (group.names.empty()) add(with_own_settings(kinds.front(), group), group.lr_factor, group.weight_decay);
    for (const auto& name : group.names) {
      const auto found = position_.find(name);
      TESSERA_CHECK(found != position_.end(), ErrorKind::kConfig,
                    "[optim.make] a parameter group names '{}', which is no parameter of the model", name);
      const size_t entry = found->second, kind = kind_of_entry[entry];
      TESSERA_CHECK(!grouped[entry], ErrorKind::kConfig, "[optim.make] '{}' is in two parameter groups", name);
      if (!by_kind.contains(kind)) {
        by_kind[kind] = add(with_own_settings(kinds[kind], group), group.lr_factor, group.weight_decay);
      }
      grouped[entry] = true;
      entries_[entry].group = by_kind[kind];
      groups_[by_kind[kind]].entries.push_back(entry);
    }
  }
  // The parameters that are in no group of the options get groups here: parameters of the same kind (UpdateKinds) with
  // the same default weight decay form one group.
  std::map<std::pair<size_t, double>, size_t> by_decay;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (grouped[i]) continue;
    const Hyperparameters& settings = kinds[kind_of_entry[i]];
    const double decay = entries_[i].slot->decay ? detail::number_of(settings, "weight_decay") : 0;
    const std::pair key(kind_of_entry[i], decay);
    auto found = by_decay.find(key);
    if (found == by_decay.end()) found = by_decay.emplace(key, add(settings, 1, decay)).first;
    entries_[i].group = found->second;
    groups_[found->second].entries.push_back(i);
  }
}

void Optimizer::set_up_groups(const char* verb) {
  for (auto& group : groups_) {
    check(group.settings, verb);
    group.state_names = state_names(group.settings);
  }
  fit_state_to_settings();
}

void Optimizer::reset_step(ParameterEntry& entry) {
  entry.step.zero_();
  entry.steps = 0;
  entry.steps_version = version_of(entry.step);
}

// The state is float32 where a master copy exists or stochastic rounding is on, else in the parameter's dtype. A
// parameter that gets a new state counts its steps from 0.
void Optimizer::make_state(ParameterEntry& entry) const {
  const bool narrow = is_narrow(entry.local), master = precision_.master_weights && narrow;
  const bool wide_state = master || (precision_.stochastic_rounding && narrow);
  const auto options = entry.local.options().dtype(wide_state ? c10::kFloat : entry.local.scalar_type());
  for (const auto& name : groups_[entry.group].state_names) {
    if (entry.state.contains(name)) continue;
    entry.state[name] = new_state(name, entry.parameter, entry.local, options);
    reset_step(entry);
  }
  if (!master || entry.state.contains(kMaster)) return;
  entry.state[kMaster] = entry.local.to(c10::kFloat);
  entry.rounded_version = version_of(entry.parameter, entry.local);
}

// Drops states that the settings do not need and makes missing ones. A frozen parameter gets its state at its first
// update.
void Optimizer::fit_state_to_settings() {
  c10::NoGradGuard no_grad;
  for (auto& group : groups_) {
    for (const size_t index : group.entries) {
      auto& entry = entries_[index];
      std::erase_if(entry.state, [&](const auto& state) {
        return state.first != kMaster && std::ranges::find(group.state_names, state.first) == group.state_names.end();
      });
      if (entry.slot->parameter.requires_grad()) make_state(entry);
    }
  }
}

// If other code wrote into the parameter since its master was rounded into it, elements of the master that no longer
// round to the parameter's value take over that value. The other elements keep their float32 digits.
void Optimizer::refresh_master(ParameterEntry& entry) {
  if (version_of(entry.parameter, entry.local) == entry.rounded_version) return;
  const at::Tensor& master = entry.state.at(kMaster);
  const at::Tensor elsewhere = master.to(entry.local.scalar_type()).ne(entry.local);
  master.copy_(at::where(elsewhere, entry.local.to(c10::kFloat), master));
}

// ParameterEntry::steps caches the value of the tensor ParameterEntry::step, so that the host does not wait for a
// device. The cache is valid while the tensor's version counter is steps_version.
int64_t Optimizer::steps_of(ParameterEntry& entry) {
  if (entry.step.is_inference() || version_of(entry.step) != entry.steps_version) {
    entry.steps = entry.step.item().toLong();
    entry.steps_version = version_of(entry.step);
  }
  return entry.steps;
}

// Adds 1 to the step counts. With found_inf it adds 1 - found_inf on the device instead, and the counts cached on the
// host become invalid.
void Optimizer::count_step(const std::vector<ParameterEntry*>& entries) const {
  std::vector<at::Tensor> counts;
  std::vector<ParameterEntry*> known;
  for (auto* entry : entries) {
    counts.push_back(entry->step);
    if (version_of(entry->step) == entry->steps_version) known.push_back(entry);
  }
  if (found_inf_.defined()) return at::_foreach_add_(counts, 1 - found_inf_);
  at::_foreach_add_(counts, 1);
  for (auto* entry : known) {
    ++entry->steps;
    entry->steps_version = version_of(entry->step);
  }
}

// Updates entries of one dtype, device and group in float32. It updates them in chunks to limit the memory of temporary
// tensors: float32 copies of the gradients and, without master weights, of the values.
void Optimizer::update_in_float32(const std::vector<ParameterEntry*>& entries) {
  // If apply() communicates, all ranks must form the same chunks, so global elements are counted instead of local ones.
  const auto elements_of = [&](const ParameterEntry* entry) {
    return communicates() ? entry->parameter.numel() : entry->local.numel();
  };
  detail::for_each_chunk(entries, elements_of, [&](const std::vector<ParameterEntry*>& chunk) {
    count_step(chunk);
    std::vector<at::Tensor> locals, gradients, values;
    for (auto* entry : chunk) {
      locals.push_back(entry->local);
      gradients.push_back(local_tensor_of(entry->parameter.grad()));
    }
    gradients = in_float32(gradients);
    if (precision_.stochastic_rounding) {
      values = in_float32(locals);
    } else {
      for (auto* entry : chunk) values.push_back(entry->state.at(kMaster));
    }
    std::vector<ParameterUpdate> updates;
    for (size_t i = 0; i < chunk.size(); ++i) updates.push_back({chunk[i], values[i], gradients[i]});
    apply(updates, groups_[chunk.front()->group]);
    if (!precision_.stochastic_rounding) return at::_foreach_copy_(locals, values);
    for (size_t i = 0; i < chunk.size(); ++i) {
      detail::round_stochastically(locals[i], values[i], chunk[i]->parameter, precision_.seed, chunk[i]->name,
                                   steps_of(*chunk[i]));
    }
  });
}

void Optimizer::step(const at::Tensor& found_inf) {
  TESSERA_CHECK(
      !found_inf.defined() || takes_found_inf(), ErrorKind::kConfig,
      "[optim.step] found found_inf for an optimizer without takes_found_inf(): its updates cannot be skipped on a "
      "device. Read found_inf on the host, and skip step() if it is 1.");
  found_inf_ = found_inf;
  const auto reset = c10::make_scope_exit([this] { found_inf_.reset(); });
  std::vector<ParameterEntry*> ready;
  for (auto& entry : entries_) {
    // entry.parameter is the tensor for which the state was made. If the module has another tensor now, the state does
    // not apply to it.
    const at::Tensor& parameter = entry.slot->parameter;
    if (!parameter.grad().defined() || !parameter.requires_grad()) continue;
    TESSERA_CHECK(parameter.is_same(entry.parameter), ErrorKind::kShape,
                  "[optim.step] {}: the parameter was replaced after the optimizer was made. Make the optimizer after "
                  "all changes of the model.",
                  entry.name);
    ready.push_back(&entry);
  }
  update(ready);
  for (auto& entry : entries_) entry.updated = false;
  ++steps_;
}

void Optimizer::step_early(const std::vector<at::Tensor>& parameters) {
  TESSERA_CHECK(
      !communicates(), ErrorKind::kConfig,
      "[optim.step_early] found an optimizer whose updates communicate, wanted one whose ranks can update alone. Use "
      "AdamW or SGD, or call step() only.");
  // update() sets ParameterEntry::updated for the parameters that step_early() updates. If one of them has a gradient
  // again at the next step(), step() raises an error; otherwise step() clears ParameterEntry::updated.
  std::unordered_set<const c10::TensorImpl*> asked;
  for (const auto& parameter : parameters) asked.insert(parameter.unsafeGetTensorImpl());
  std::vector<ParameterEntry*> ready;
  for (auto& entry : entries_) {
    if (!entry.parameter.grad().defined() || !asked.contains(entry.parameter.unsafeGetTensorImpl())) continue;
    ready.push_back(&entry);
  }
  update(ready);
}

void Optimizer::update(const std::vector<ParameterEntry*>& entries) {
  c10::NoGradGuard no_grad;
  using Key = std::tuple<c10::ScalarType, c10::Device, size_t>;
  std::vector<std::pair<Key, std::vector<ParameterEntry*>>> batches, narrow_batches;  // few, in parameter order
  for (auto* const each : entries) {
    auto& entry = *each;
    const at::Tensor &parameter = entry.parameter, &gradient = parameter.grad();
    TESSERA_CHECK(
        !std::exchange(entry.updated, true), ErrorKind::kInternal,
        "[optim.step] {}: found a further gradient after an early update in this step. Update parameters only "
        "when their gradients are complete.",
        entry.name);
    TESSERA_CHECK(is_dtensor(gradient) == is_dtensor(parameter) &&
                      (!is_dtensor(parameter) || placements(gradient) == placements(parameter)),
                  ErrorKind::kShape,
                  "[optim.step] {}: found a gradient with placements {} and a parameter with placements {}, wanted the "
                  "same. Redistribute the gradient.",
                  entry.name, is_dtensor(gradient) ? to_string(placements(gradient)) : "a plain tensor",
                  is_dtensor(parameter) ? to_string(placements(parameter)) : "a plain tensor");
    make_state(entry);  // for a parameter that was frozen when the others got their state
    // Parameters are collected in batches of one dtype, device and parameter group, so that one fused or foreach call
    // updates many parameters. narrow_batches has the parameters that update_in_float32() updates, `batches` has all
    // others.
    const bool narrow = entry.state.contains(kMaster) || (precision_.stochastic_rounding && is_narrow(entry.local));
    auto& among = narrow ? narrow_batches : batches;
    const Key key{entry.local.scalar_type(), entry.local.device(), entry.group};
    auto batch = std::ranges::find_if(among, [&](const auto& other) { return other.first == key; });
    if (batch == among.end()) batch = among.insert(among.end(), {key, {}});
    batch->second.push_back(&entry);
  }
  // Parameters may share a version counter (views of one flat parameter): an update of one parameter then looks like a
  // write to all of them. So refresh_master() runs for all entries before the first update, and rounded_version is set
  // for all entries after the last one.
  const auto for_each_master = [&](const auto& visit) {
    for (const auto& [key, batch] : narrow_batches) {
      for (auto* entry : batch) {
        if (entry->state.contains(kMaster)) visit(*entry);
      }
    }
  };
  for_each_master([this](ParameterEntry& entry) { refresh_master(entry); });
  for (const auto& [key, batch] : narrow_batches) update_in_float32(batch);
  for_each_master([](ParameterEntry& entry) { entry.rounded_version = version_of(entry.parameter, entry.local); });
  for (const auto& [key, batch] : batches) {
    count_step(batch);
    std::vector<ParameterUpdate> updates;
    for (auto* entry : batch) updates.push_back({entry, entry->local, local_tensor_of(entry->parameter.grad())});
    apply(updates, groups_[std::get<2>(key)]);
    // Fused kernels do not increment the version counters of parameters. The counters are incremented here, because
    // code that caches copies of parameters compares the version counters.
    for (const auto* entry : batch) {
      if (!entry->local.is_inference()) entry->local.unsafeGetTensorImpl()->bump_version();
    }
  }
}

void Optimizer::zero_grad() {
  for (auto& entry : entries_) entry.slot->parameter.mutable_grad().reset();
}

std::vector<std::string> Optimizer::parameter_names() const {
  std::vector<std::string> names;
  for (const auto& entry : entries_) names.push_back(entry.name);
  return names;
}

const Optimizer::ParameterEntry& Optimizer::entry_of(const std::string& parameter, const char* verb) const {
  const auto found = position_.find(parameter);
  TESSERA_CHECK(found != position_.end(), ErrorKind::kConfig, "[optim.{}] no parameter is named '{}'", verb, parameter);
  return entries_[found->second];
}

const nn::ParameterSlot& Optimizer::slot(const std::string& parameter) const {
  return *entry_of(parameter, "slot").slot;
}

bool Optimizer::has_master(const std::string& parameter) const {
  const auto& entry = entry_of(parameter, "has_master");
  return entry.state.empty() ? precision_.master_weights && is_narrow(entry.local) : entry.state.contains(kMaster);
}

// Returns the local states as DTensors with the parameter's placements. They share the storage of the states, because
// loading a checkpoint writes into them.
std::map<std::string, at::Tensor> Optimizer::state(const std::string& parameter) const {
  c10::NoGradGuard no_grad;
  const auto& entry = entry_of(parameter, "state");
  std::map<std::string, at::Tensor> out;
  for (const auto& [name, local] : entry.state) {
    out[name] = local;
    if (is_dtensor(entry.parameter) && !is_replicated_state(name)) {
      out[name] = tessera::make_dtensor(local, device_mesh(entry.parameter),
                                        tessera::make_shared_placements(placements(entry.parameter)),
                                        entry.parameter.sizes(), entry.parameter.strides());
    }
  }
  out["step"] = entry.step;
  return out;
}

void Optimizer::reset_state(const std::string& parameter, bool even_frozen, const std::set<std::string>& except) {
  c10::NoGradGuard no_grad;
  auto& entry = const_cast<ParameterEntry&>(entry_of(parameter, "reset_state"));
  reset_step(entry);
  if (even_frozen || entry.slot->parameter.requires_grad()) make_state(entry);
  for (const auto& [name, value] : entry.state) {
    if (except.contains(name)) continue;
    if (name == kMaster) {
      value.copy_(entry.local);
      entry.rounded_version = version_of(entry.parameter, entry.local);
    } else {
      value.zero_();
    }
  }
}

}  // namespace tessera::optim
