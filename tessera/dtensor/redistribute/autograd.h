// The differentiable conversions. Arguments are checked by the callers in dtensor.cc.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

// Partial becomes Replicate: how a gradient lies, which need not be kept in parts.
Placements partial_to_replicated(Placements placements);
// grad_placements: how the gradient of the local tensor shall lie.
at::Tensor from_local_with_gradient(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                                    c10::IntArrayRef sizes, c10::IntArrayRef strides,
                                    const Placements& grad_placements);
at::Tensor to_local_with_gradient(const at::Tensor& tensor, const Placements& grad_placements);
// cause: the operation that needs it; null where the user asked for it.
at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const Placements& to,
                                      const RedistributeOptions& options, const char* cause = nullptr);
// A gradient in the wanted placements; differentiable where backward is recorded. verb: for messages.
at::Tensor gradient_in(const char* verb, const at::Tensor& gradient, const Placements& wanted,
                       const RedistributeOptions& options = {});
// Without gradient. The result may share memory with the tensor only when may_alias is set; with async_op its local
// part may still be under way. asked_for: by the user, not by an operation (ExplicitRedistribution).
struct RedistributeHow {
  bool async_op = false;
  bool asked_for = false;
  const char* cause = "the value of a tensor";
};
at::Tensor redistribute_values(const at::Tensor& tensor, const Placements& to, bool may_alias,
                               const RedistributeHow& how = {});

}  // namespace tessera
