// Turns a module's parameters and buffers into DTensors, and wraps its call.
//
//   distribute_module(*model, mesh, {
//       .partition_fn = [](const std::string& name, nn::Module& module, const MeshPtr& mesh) {
//         for (auto& slot : module.own_parameters()) {
//           nn::Module::set_parameter(slot, distribute_tensor(slot.parameter.detach(), mesh, {Shard(0)}));
//         }
//       },
//       .output_fn = [](nn::Module&, nn::TensorRefs& outputs, const MeshPtr&) { *outputs[0] = full_tensor(*outputs[0]);
//       }});
//
// COLLECTIVE over the mesh. Once a module: a second call is an Error kShape.
#pragma once

#include <functional>
#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera {

struct DistributeModuleOptions {
  // For the module ("") and each one below it; may replace parameters and buffers. What it leaves plain is replicated,
  // with the first rank's values.
  std::function<void(const std::string& name, nn::Module& module, const MeshPtr& mesh)> partition_fn = {};
  // Before and after the module's own call: may replace the tensors among its inputs and outputs.
  std::function<void(nn::Module& module, nn::TensorRefs& inputs, const MeshPtr& mesh)> input_fn = {};
  std::function<void(nn::Module& module, nn::TensorRefs& outputs, const MeshPtr& mesh)> output_fn = {};
};

void distribute_module(nn::Module& module, const MeshPtr& mesh, const DistributeModuleOptions& options = {});

}  // namespace tessera
