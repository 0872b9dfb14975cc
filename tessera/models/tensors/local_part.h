// The part of a parameter that this rank holds, whatever the parameter is: plain or DTensor, meta or allocated.
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

// One parameter under all its names: several where weights are tied.
struct SharedParameter {
  at::Tensor tensor;
  std::vector<std::string> names;
  std::vector<nn::ParameterSlot*> slots;
};
enum class Parameters { kOfModel, kOfAdapters };
// In the order of named_parameters(); those of adapters (nn::AdapterPart) are no part of the model.
std::vector<SharedParameter> shared_parameters(nn::Module& module, Parameters which = Parameters::kOfModel);
// Those of the model, and behind them, in the order of nn::packed_weights(), one without slot for each packed weight:
// on the meta device, of the shape that it stands for, under the name that it would have.
std::vector<SharedParameter> parameters_and_packed(nn::Module& module);
// Of the first that is a DTensor; null: all are plain.
MeshPtr mesh_of(const std::vector<SharedParameter>& parameters);
// What a file may call it, likeliest first.
std::vector<std::string> file_names(const WeightMap& map, const SharedParameter& parameter);

// Shape and offset of the local part in the whole. Error kShape for placements that hold no simple box.
LocalBox local_part_box(const at::Tensor& parameter);

// The tensor to write the local part into. A parameter on the meta device is first allocated, on the device of its mesh
// or on `device`, and put into all its slots.
at::Tensor writable_part(SharedParameter& parameter, c10::Device device);

}  // namespace tessera
