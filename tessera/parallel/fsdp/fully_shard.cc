#include "tessera/parallel/fsdp/fully_shard.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/ranges.h>

#include <set>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tessera/parallel/fsdp/fsdp_state.h"

namespace tessera {
namespace {

void check_mesh(const FullyShardOptions& options) {
  TESSERA_CHECK(options.mesh != nullptr, ErrorKind::kShape,
                "[fsdp.shard] no mesh given. Make one with init_device_mesh.");
  const auto& mesh = *options.mesh;
  TESSERA_CHECK(mesh.ndim() == 1 || mesh.ndim() == 2, ErrorKind::kShape,
                "[fsdp.shard] fully_shard expects a 1D or 2D DeviceMesh but got {}", mesh.to_string());
  TESSERA_CHECK(mesh.ndim() == 1 || !mesh.dim_names().empty(), ErrorKind::kShape,
                "[fsdp.shard] {}: a 2D mesh (replicate, shard) needs dim names. Pass them to init_device_mesh.",
                mesh.to_string());
  TESSERA_CHECK(mesh.coordinate().has_value(), ErrorKind::kShape, "[fsdp.shard] rank {} is not part of {}", mesh.rank(),
                mesh.to_string());
}

void check_parameter(const std::string& name, const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.dim() > 0, ErrorKind::kShape,
                "[fsdp.shard] {}: fully_shard doesn't support scalar parameters. Change it to a 1D tensor with numel "
                "equal to 1.",
                name);
  TESSERA_CHECK(tensor.is_contiguous(), ErrorKind::kShape,
                "[fsdp.shard] {}: FSDP does not support non-contiguous parameters, found strides {} for shape {}. Call "
                "contiguous() on it.",
                name, fmt::join(tensor.strides(), ","), fmt::join(tensor.sizes(), "x"));
}

// The placements of the parameter over the tensor-parallel mesh; null if it is a plain tensor and replicated_over is
// not set.
std::shared_ptr<const TensorParallelLayout> tensor_parallel_layout_of(const std::string& name, const at::Tensor& tensor,
                                                                      const FullyShardOptions& options) {
  if (is_dtensor(tensor)) {
    return make_tensor_parallel_layout(name, options.mesh, device_mesh(tensor), placements(tensor),
                                       tensor.sizes().vec(),
                                       /*plain=*/false);
  }
  if (!options.replicated_over) return nullptr;
  const auto& mesh = options.replicated_over;
  return make_tensor_parallel_layout(name, options.mesh, mesh,
                                     Placements(static_cast<size_t>(mesh->ndim()), Replicate()), tensor.sizes().vec(),
                                     /*plain=*/true);
}

// The parameters at and below `module` that no nested fully_shard call manages. A tied parameter is listed once, with
// all its slots. A tensor that a nested call has sharded must not be held by a slot outside that call's group, neither
// sharded nor in its original form: two groups would shard it.
std::vector<ShardedParam> unmanaged_parameters(nn::Module& module, const FullyShardOptions& options) {
  std::set<SlotRef> managed;
  std::set<const c10::TensorImpl*> managed_tensors;
  for (auto* state : fsdp_states(module)) {
    if (state->group() == nullptr) continue;
    for (const auto& param : state->group()->params()) {
      managed_tensors.insert(param.parameter.unsafeGetTensorImpl());
      managed.insert(param.slots.begin(), param.slots.end());
    }
    for (const auto& original : state->group()->originals()) {
      if (!original.expired()) managed_tensors.insert(original._unsafe_get_target());
    }
  }
  std::vector<ShardedParam> out;
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  for (const auto& named : module.named_parameters(true)) {
    const auto slot = SlotRef::of(named);
    if (managed.contains(slot)) continue;
    const at::Tensor& tensor = named.slot->parameter;
    TESSERA_CHECK(!managed_tensors.contains(tensor.unsafeGetTensorImpl()), ErrorKind::kShape,
                  "[fsdp.shard] {}: shared with a parameter already managed by another FSDP group. Shard the modules "
                  "that share it by one call.",
                  named.name);
    const auto [found, fresh] = seen.emplace(tensor.unsafeGetTensorImpl(), out.size());
    if (fresh) {
      const at::Tensor part = local_tensor_of(tensor.detach());
      check_parameter(named.name, part);
      out.push_back({.name = named.name,
                     .slots = {},
                     .shape = part.sizes().vec(),
                     .dtype = tensor.scalar_type(),
                     .gather_dtype = tensor.scalar_type(),
                     .parameter = tensor,
                     .local = {},
                     .whole = {},
                     .tensor_parallel = tensor_parallel_layout_of(named.name, tensor, options)});
    }
    out[found->second].slots.push_back(slot);
  }
  return out;
}

std::vector<FsdpState*> states_of(nn::Module& module, bool recurse, const char* verb) {
  return require_states<FsdpState>(module, recurse, std::string("fsdp.") + verb, "sharded", "fully_shard");
}

std::vector<ShardingState*> sharding_states_of(nn::Module& module) {
  return require_states<ShardingState>(module, /*recurse=*/true, "fsdp.stats", "sharded", "fully_shard or wrap_fsdp1");
}

}  // namespace

void fully_shard(nn::Module& module, const FullyShardOptions& options) {
  check_mesh(options);
  TESSERA_CHECK(!module.sharding(), ErrorKind::kShape, "[fsdp.shard] fully_shard was called on this module already");
  // replicate or wrap_fsdp1 on a module below this one would reduce gradients that this call reduces, too.
  TESSERA_CHECK(data_parallel_states(module).size() == fsdp_states(module).size(), ErrorKind::kShape,
                "[fsdp.shard] replicate or wrap_fsdp1 was called on a module below this one. Use one of the two.");
  // Everything is checked and collected before FsdpParamGroup replaces the first parameter, so an error leaves the
  // module as it was.
  auto params = unmanaged_parameters(module, options);
  std::shared_ptr<FsdpParamGroup> group;
  if (!params.empty()) {
    const bool on_host = options.cpu_offload && options.mesh->device_type() != c10::DeviceType::CPU;
    group = std::make_shared<FsdpParamGroup>(std::move(params), options.mesh, options.mp_policy, on_host);
  }
  auto state = std::make_shared<FsdpState>(module, options, std::move(group));
  module.set_sharding(state);
  state->install_hooks();
}

bool is_fully_sharded(nn::Module& module) { return !fsdp_states(module).empty(); }

void set_reshard_after_forward(nn::Module& module, bool on, bool recurse) {
  for (auto* state : states_of(module, recurse, "set_reshard_after_forward")) state->set_reshard_after_forward(on);
}

void set_reshard_after_backward(nn::Module& module, bool on, bool recurse) {
  for (auto* state : states_of(module, recurse, "set_reshard_after_backward")) state->set_reshard_after_backward(on);
}

void set_is_last_backward(nn::Module& module, bool on) {
  for (auto* state : states_of(module, true, "set_is_last_backward")) state->set_is_last_backward(on);
}

void set_gradients_hook(nn::Module& module, const GradientsHook& hook) {
  for (auto* state : states_of(module, true, "set_gradients_hook")) {
    if (state->group() != nullptr) state->group()->set_gradients_hook(hook);
  }
}

void set_prefetch(nn::Module& module, bool on) {
  for (auto* state : states_of(module, true, "set_prefetch")) state->set_prefetch(on);
}

void unshard(nn::Module& module) {
  auto* group = states_of(module, false, "unshard")[0]->group();
  if (group == nullptr) return;
  group->start_unshard();
  group->finish_unshard();
  group->use_unsharded_params(group->unsharded_tensors());
}

void reshard(nn::Module& module) {
  auto* group = states_of(module, false, "reshard")[0]->group();
  if (group != nullptr) group->reshard();
}

FsdpStats fsdp_stats(nn::Module& root) {
  FsdpStats sum;
  // All states below one root share one FsdpCommSchedule, which holds the root's statistics. So the statistics of each
  // schedule are added to `sum` only once.
  std::set<FsdpCommSchedule*> seen;
  for (auto* state : sharding_states_of(root)) {
    if (state->param_group() != nullptr) sum.accumulated_bytes += state->param_group()->accumulated_bytes();
    auto* schedule = state->schedule();
    if (schedule == nullptr || !seen.insert(schedule).second) continue;
    const auto& stats = schedule->stats();
    sum.all_gathers += stats.all_gathers;
    sum.piecewise_gathers += stats.piecewise_gathers;
    sum.reduce_scatters += stats.reduce_scatters;
    sum.unsharded_groups += stats.unsharded_groups;
    sum.peak_unsharded_groups += stats.peak_unsharded_groups;
    sum.unsharded_bytes += stats.unsharded_bytes;
  }
  return sum;
}

void reset_fsdp_stats(nn::Module& root) {
  for (auto* state : sharding_states_of(root)) {
    if (state->schedule() == nullptr) continue;
    auto& stats = state->schedule()->stats();
    stats.all_gathers = stats.piecewise_gathers = stats.reduce_scatters = 0;
    stats.peak_unsharded_groups = stats.unsharded_groups;
  }
}

void to_empty(nn::Module& module, c10::Device device) {
  for (auto* state : fsdp_states(module)) {
    if (state->group() == nullptr) continue;
    TESSERA_CHECK(
        state->group()->mesh()->device_type() == device.type(), ErrorKind::kShape,
        "[fsdp.to_empty] found parameters sharded over {}, but the device {}. Pass a device of the mesh's type.",
        state->group()->mesh()->to_string(), device.str());
    state->group()->shards().allocate_meta_shards();
  }
  const c10::NoGradGuard no_grad;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> replaced;
  for (const auto& named : module.named_parameters(true)) {
    // The shards of the FSDP parameter groups have been allocated above. Parameters that are still on the meta device
    // belong to no group; some of them are DTensors of tensor parallelism. A tied parameter is allocated once.
    const at::Tensor old = named.slot->parameter;
    const at::Tensor part = local_tensor_of(old.detach());
    if (!part.is_meta()) continue;
    at::Tensor& fresh = replaced[old.unsafeGetTensorImpl()];
    if (!fresh.defined()) {
      fresh = at::empty_like(part, part.options().device(device));
      if (is_dtensor(old)) {
        fresh = from_local(fresh, device_mesh(old), placements(old),
                           {.shape = old.sizes().vec(), .stride = old.strides().vec()});
      }
      fresh.set_requires_grad(old.requires_grad());
    }
    nn::Module::set_parameter(*named.slot, fresh);
  }
  // A packed weight is not a parameter. Loading the model allocates it later, on the device that is set here.
  for (const auto& [name, packed] : nn::packed_weights(module)) {
    if (!packed->weight.defined()) packed->device = device;
  }
  for (const auto& [path, child] : module.named_modules()) {
    for (auto& buffer : child->own_buffers()) {
      if (buffer.slot->defined() && buffer.slot->is_meta()) {
        *buffer.slot = at::empty_like(*buffer.slot, buffer.slot->options().device(device));
      }
    }
  }
}

}  // namespace tessera
