#include "tessera/models/tensors/model_parameters.h"

#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/layout.h"
#include "tessera/models/config/family.h"
#include "tessera/nn/linear/lora.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera {

std::vector<SharedParameter> shared_parameters(nn::Module& module, ParameterSet parameter_set) {
  std::vector<SharedParameter> out;
  // Parameter slots that hold the same tensor (tied weights) become one entry.
  std::unordered_map<const at::TensorImpl*, size_t> seen;
  for (const auto& named : module.named_parameters(/*all=*/true)) {
    const bool of_adapter = dynamic_cast<nn::AdapterModule*>(named.owner) != nullptr;
    if (of_adapter != (parameter_set == ParameterSet::kOfAdapters)) continue;
    const auto [found, fresh] = seen.emplace(named.slot->parameter.unsafeGetTensorImpl(), out.size());
    if (fresh) out.push_back({named.slot->parameter, {}, {}});
    out[found->second].names.push_back(named.name);
    out[found->second].slots.push_back(named.slot);
  }
  return out;
}

// A packed weight has no parameter slot. Its entry has a meta tensor of the weight's shape, so that callers can compare
// names and shapes.
std::vector<SharedParameter> parameters_and_packed(nn::Module& module) {
  auto all = shared_parameters(module);
  const auto dtype = all.empty() ? at::kFloat : all.front().tensor.scalar_type();
  for (const auto& [name, packed] : nn::packed_weights(module)) {
    const auto form = at::empty({packed->out, packed->in}, at::TensorOptions(dtype).device(at::kMeta));
    all.push_back({form, {name}, {}});
  }
  return all;
}

MeshPtr mesh_of(const std::vector<SharedParameter>& parameters) {
  for (const auto& parameter : parameters) {
    if (is_dtensor(parameter.tensor)) return device_mesh(parameter.tensor);
  }
  return nullptr;
}

std::vector<std::string> file_names(const WeightMap& map, const SharedParameter& parameter) {
  std::vector<std::string> all;
  for (const auto& own : parameter.names) {
    for (auto& name : map.names_of(own)) all.push_back(std::move(name));
  }
  return all;
}

// Returns the box (shape and offset in the unsharded tensor) of this rank's shard; for a plain tensor the whole tensor.
// Files are read by boxes. The shard of a tensor-parallel parameter under FSDP (StridedShard) is one box. Other strided
// shards consist of several boxes: Error kShape.
LocalBox local_shard_box(const at::Tensor& parameter) {
  const auto shape = parameter.sizes().vec();
  if (!is_dtensor(parameter)) return {shape, std::vector<int64_t>(shape.size(), 0)};
  for (size_t i = 0; i < placements(parameter).size(); ++i) {
    const auto& placement = placements(parameter)[i];
    TESSERA_CHECK(placement.is_replicate() || placement.is_shard() ||
                      is_inside_later_shards(*device_mesh(parameter), placements(parameter), i),
                  ErrorKind::kShape,
                  "[models.weights] a parameter has placements {}: wanted Shard or Replicate on every mesh dim, or the "
                  "strided shards that FSDP makes of tensor-parallel parameters",
                  to_string(placements(parameter)));
  }
  return local_box(shape, *device_mesh(parameter), placements(parameter));
}

at::Tensor writable_local_shard(SharedParameter& parameter, c10::Device device) {
  at::NoGradGuard no_grad;
  const auto& old = parameter.tensor;
  const bool distributed = is_dtensor(old);
  const auto local = distributed ? to_local(old) : old;
  if (!local.is_meta()) return local;
  const auto where = distributed ? device_mesh(old)->device() : device;
  const auto fresh = at::empty(local.sizes(), local.options().device(where));
  // The new DTensor has the mesh and placements of the old one. It is set in all slots of the parameter, so that tied
  // weights stay tied.
  auto value = fresh;
  if (distributed) {
    value = from_local(fresh, device_mesh(old), placements(old),
                       {.shape = old.sizes().vec(), .stride = old.strides().vec()});
  }
  value.set_requires_grad(old.requires_grad());
  parameter.tensor = value;
  for (auto* slot : parameter.slots) nn::Module::set_parameter(*slot, value);
  return fresh;
}

}  // namespace tessera
