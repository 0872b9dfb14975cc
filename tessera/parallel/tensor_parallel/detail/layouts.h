// Conversions between plain tensors and DTensors for the hooks of styles.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera::detail {

// Resolves a negative shard dim for a tensor of `ndim` dims: Shard(-1) becomes Shard(ndim - 1).
Placement resolve_negative_dim(const Placement& placement, int64_t ndim);
// Wraps a plain tensor as a DTensor with the placement `layout`. global_extent: the global size of the sharded dim; -1:
// local size times number of ranks. No communication.
at::Tensor as_dtensor(const at::Tensor& tensor, const MeshPtr& mesh, const Placement& layout,
                      int64_t global_extent = -1);
// Redistributes a DTensor to `target`. Returns the same tensor if it has that placement already, else COLLECTIVE over
// the DTensor's mesh.
at::Tensor redistribute_to(const at::Tensor& dtensor, const Placement& target);
// Registers a pre-hook that redistributes the first tensor of each call to `target`. A plain tensor is assumed to have
// the placement `plain_layout`. last_extent: the global size of the last dim, needed where `plain_layout` shards that
// dim unevenly. A call of the module is COLLECTIVE over the mesh if the tensor's placement is not `target`.
void redistribute_first_input(nn::Module& module, const StyleContext& context, const Placement& plain_layout,
                              const Placement& target, int64_t last_extent = -1);
// Replaces every DTensor by its local tensor.
void make_local(const nn::TensorRefs& tensors);
// The first tensor of a call's arguments or results. `list_name` names them in the message. Error kShape if it is
// missing.
at::Tensor& first_tensor(const nn::TensorRefs& tensors, const std::string& path, const char* list_name);
// Describes a style as text, for example "ColwiseParallel(R -> S(-1), local)". `input` and `output` are the style's
// default layouts.
std::string describe_layouts(const std::string& style, const LayoutOptions& options, const Placement& input,
                             const Placement& output);
// Marks the module as distributed. Error kConfig if a style that shards parameters was applied to it before.
void mark_distributed_once(nn::Module& module, const std::string& path);

}  // namespace tessera::detail
