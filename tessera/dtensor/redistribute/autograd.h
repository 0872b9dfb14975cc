// from_local, to_local and redistribute with autograd. The functions do not check their arguments; the public functions
// in conversions.cc do.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

// Returns the placements with Replicate for each Partial, which are the default placements of the tensor's gradient.
Placements partial_to_replicated(Placements placements);
// from_local() and to_local() with autograd. `grad_placements` are the placements that the gradient has when it is
// converted, in backward, to a local tensor (from_local) or from a local tensor (to_local).
at::Tensor from_local_with_gradient(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                                    c10::IntArrayRef sizes, c10::IntArrayRef strides,
                                    const Placements& grad_placements);
at::Tensor to_local_with_gradient(const at::Tensor& tensor, const Placements& grad_placements);
// `cause` is the name of the operation that needs the redistribution; null if the user called redistribute.
at::Tensor redistribute_with_gradient(const at::Tensor& tensor, const Placements& to,
                                      const RedistributeOptions& options, const char* cause = nullptr);
// Redistributes a gradient to `target`. Autograd records the redistribution if the backward runs with create_graph.
// `verb` names the operation in error messages and logs.
at::Tensor redistribute_gradient(const char* verb, const at::Tensor& gradient, const Placements& target,
                                 const RedistributeOptions& options = {});
// Redistributes without recording a gradient. The result may share memory with the tensor only if `may_alias` is set.
// With async_op the collective may still be running on return; the first use of the local tensor waits for it.
// `is_explicit`: the user requested the redistribution, not an operation (see ExplicitRedistribution).
struct RedistributeValuesOptions {
  bool async_op = false;
  bool is_explicit = false;
  const char* cause = "the value of a tensor";
};
at::Tensor redistribute_values(const at::Tensor& tensor, const Placements& to, bool may_alias,
                               const RedistributeValuesOptions& options = {});

}  // namespace tessera
