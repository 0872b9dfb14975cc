// The parameters and gradients of a wrapped model, collected from all ranks under the names that they had before
// wrapping.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <string>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/fsdp1/fully_sharded_data_parallel.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {

using NamedTensors = std::map<std::string, at::Tensor>;

// Wraps every layer, then the root.
inline void wrap(SmallModel& model, const Fsdp1Options& options) {
  for (auto* layer : blocks_of(model)) wrap_fsdp1(*layer, options);
  wrap_fsdp1(model, options);
}

// COLLECTIVE over all ranks. `flat` is this rank's shard of a flat tensor of the unit.
inline void unflatten_into(const FlatParameterHandle& handle, const at::Tensor& flat, NamedTensors& out) {
  at::Tensor whole = flat.clone();
  if (handle.sharding_strategy() != ShardingStrategy::kNoShard) {
    whole = at::empty({handle.layout().padded_numel()}, flat.options());
    comm::all_gather_into(*handle.group(), whole, flat.contiguous()).wait();
  }
  const auto members = handle.layout().unflatten(whole);
  for (size_t i = 0; i < members.size(); ++i) {
    out[handle.prefix() + handle.layout().members()[i].fqn] = members[i].clone();
  }
}

inline NamedTensors whole_values(nn::Module& root) {
  at::NoGradGuard no_grad;
  NamedTensors out;
  for (const auto& handle : flat_parameter_handles(root)) unflatten_into(*handle, handle->shard(), out);
  return out;
}

// Returns the gradients of the whole parameters; a missing gradient is zeros.
inline NamedTensors whole_grads(nn::Module& root) {
  at::NoGradGuard no_grad;
  NamedTensors out;
  for (const auto& handle : flat_parameter_handles(root)) {
    const auto infos = handle->shard_param_infos();
    const auto parameters = handle->parameters();
    at::Tensor flat = at::zeros_like(handle->shard());
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& grad = parameters[i].grad();
      if (!grad.defined()) continue;
      if (!handle->layout().use_orig_params()) {
        flat.copy_(grad);
      } else if (handle->sharding_strategy() == ShardingStrategy::kNoShard) {
        const auto& member = handle->layout().members()[i];
        flat.as_strided(member.shape, member.strides, handle->layout().offset(i)).copy_(grad);
      } else {
        flat.narrow(0, infos[i].offset_in_shard, infos[i].numel_in_shard).copy_(grad);
      }
    }
    unflatten_into(*handle, flat, out);
  }
  return out;
}

inline NamedTensors plain_values(nn::Module& module) {
  NamedTensors out;
  for (const auto& named : module.named_parameters()) out[named.name] = named.slot->parameter.detach().clone();
  return out;
}
inline NamedTensors plain_grads(nn::Module& module) {
  NamedTensors out;
  for (const auto& named : module.named_parameters()) {
    const auto& grad = named.slot->parameter.grad();
    out[named.name] = grad.defined() ? grad.clone() : at::zeros_like(named.slot->parameter.detach());
  }
  return out;
}

inline double distance(const NamedTensors& a, const NamedTensors& b) {
  std::vector<at::Tensor> left, right;
  for (const auto& [name, tensor] : a) {
    if (!b.contains(name)) return 1;
    left.push_back(tensor);
    right.push_back(b.at(name));
  }
  return a.size() == b.size() ? distance(left, right) : 1;
}

// Runs backward over this rank's rows of step `step`, as users of FSDP write it. The mean over ranks is the gradient of
// all rows.
inline void mean_backward(SmallModel& model, const comm::World& world, int64_t step) {
  backward(model, rows_of_rank(tokens_of(step), world.rank(), world.size()), 12 / world.size());
}

}  // namespace tessera::testing
