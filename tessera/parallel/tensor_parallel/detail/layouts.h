// What the hooks of styles do with a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera::detail {

// A placement on a tensor of so many dims, Shard(-1) counted from its end.
Placement on_dims(const Placement& placement, int64_t ndim);
// A plain tensor as a DTensor that lies as `layout`; global_extent: the size of its sharded dim, -1: local times ranks.
at::Tensor as_dtensor(const at::Tensor& tensor, const MeshPtr& mesh, const Placement& layout,
                      int64_t global_extent = -1);
// Brought to `wanted`; the very tensor where it lies so already. COLLECTIVE over its mesh otherwise.
at::Tensor laid_out(const at::Tensor& dtensor, const Placement& wanted);
// From now on the first tensor of each call of the module is brought to `wanted`; a plain one is taken for one that
// lies as `given`. last_extent: the global size of its last dim, which is needed where `given` shards that unevenly.
// COLLECTIVE likewise.
void bring_first_input(nn::Module& module, const StyleContext& context, const Placement& given, const Placement& wanted,
                       int64_t last_extent = -1);
// DTensors become their local parts.
void make_local(const nn::TensorRefs& tensors);
// The first of the tensors among a call's arguments, which a style needs. Error kShape when there is none.
at::Tensor& first_of(const nn::TensorRefs& tensors, const std::string& path, const char* what);
// "ColwiseParallel(R -> S(-1), local)"; `input` and `output` are the style's defaults.
std::string describe_layouts(const std::string& style, const LayoutOptions& options, const Placement& input,
                             const Placement& output);
// Error kConfig: a style that shards parameters was applied to the module already.
void claim(nn::Module& module, const std::string& path);

}  // namespace tessera::detail
