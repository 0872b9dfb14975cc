// Turns a module's parameters and buffers into DTensors, and registers hooks on its inputs and outputs. Semantics of
// torch.distributed.tensor.distribute_module.
//
//   distribute_module(*model, mesh, {
//       .partition_fn = [](const std::string& name, nn::Module& module, const MeshPtr& mesh) {
//         for (auto& slot : module.own_parameters()) {
//           nn::Module::set_parameter(slot, distribute_tensor(slot.parameter.detach(), mesh, {Shard(0)}));
//         }
//       },
//       .output_fn = [](nn::Module&, nn::TensorRefs& outputs, const MeshPtr&) {
//         *outputs[0] = full_tensor(*outputs[0]);
//       }});
//
// COLLECTIVE over the mesh. distribute_module may be called only once on a module: a second call raises Error kShape.
#pragma once

#include <functional>
#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera {

struct DistributeModuleOptions {
  // Called for the module (name "") and each module below it; may replace parameters and buffers. Parameters and
  // buffers that are plain afterwards are replicated with the values of the mesh's first rank.
  std::function<void(const std::string& name, nn::Module& module, const MeshPtr& mesh)> partition_fn = {};
  // input_fn is called before the forward of the module itself, and output_fn after it. They may replace the tensors
  // among the inputs and outputs.
  std::function<void(nn::Module& module, nn::TensorRefs& inputs, const MeshPtr& mesh)> input_fn = {};
  std::function<void(nn::Module& module, nn::TensorRefs& outputs, const MeshPtr& mesh)> output_fn = {};
};

// Turns the parameters and buffers of `module` into DTensors over `mesh` and registers the hooks of `options`.
// COLLECTIVE over the mesh. Error kShape for a null mesh or a second call on the module.
void distribute_module(nn::Module& module, const MeshPtr& mesh, const DistributeModuleOptions& options = {});

}  // namespace tessera
