// The parameters of a model with all their names, and the local shard of a parameter. A parameter may be a plain tensor
// or a DTensor, on the meta device or allocated.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/nn/module.h"

namespace tessera {
struct WeightMap;
}

namespace tessera {

// A parameter with all its names; tied weights have several.
struct SharedParameter {
  at::Tensor tensor;
  std::vector<std::string> names;
  std::vector<nn::ParameterSlot*> slots;
};
enum class ParameterSet { kOfModel, kOfAdapters };
// Returns the parameters in the order of named_parameters(). kOfModel: without the parameters of adapters
// (nn::AdapterModule). kOfAdapters: only these.
std::vector<SharedParameter> shared_parameters(nn::Module& module, ParameterSet parameter_set = ParameterSet::kOfModel);
// Returns the model's parameters, then one entry without slot for each packed weight, in the order of
// nn::packed_weights(). The tensor of such an entry is on the meta device, with the shape and the name of the weight
// before packing.
std::vector<SharedParameter> parameters_and_packed(nn::Module& module);
// Returns the mesh of the first DTensor; null when all parameters are plain.
MeshPtr mesh_of(const std::vector<SharedParameter>& parameters);
// Returns the names that a parameter may have in a file, most likely first.
std::vector<std::string> file_names(const WeightMap& map, const SharedParameter& parameter);

// Returns the shape of the local shard and its offset in the unsharded tensor. Error kShape for placements whose local
// shard is not one rectangular region.
LocalBox local_shard_box(const at::Tensor& parameter);

// Returns the local tensor of the parameter, for writing. A parameter on the meta device is first allocated, a DTensor
// on the device of its mesh and a plain tensor on `device`, and set in all its slots.
at::Tensor writable_local_shard(SharedParameter& parameter, c10::Device device);

}  // namespace tessera
