#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/parallel/tensor_parallel/detail/layouts.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

using namespace detail;

std::string SequenceParallel::describe() const {
  return fmt::format("{}(dim {}{})", gathers_output_ ? "SequenceParallelAllGatherActivation" : "SequenceParallel",
                     options_.sequence_dim, options_.use_local_output ? ", local" : "");
}

void SequenceParallel::apply(nn::Module& module, const StyleContext& context) const {
  mark_distributed_once(module, context.path);
  context.replicate_plain(module);
  redistribute_first_input(module, context, Shard(options_.sequence_dim), Shard(options_.sequence_dim));
  module.register_forward_hook(
      [gather = gathers_output_, local = options_.use_local_output](nn::Module&, nn::TensorRefs& outputs) {
        for (at::Tensor* y : outputs) {
          if (gather && y->defined() && is_dtensor(*y)) *y = redistribute_to(*y, Replicate());
        }
        if (local) make_local(outputs);
      });
}

std::string RotaryEmbedParallel::describe() const {
  return fmt::format("RotaryEmbedParallel(dim {}{})", options_.sequence_dim,
                     options_.use_local_output ? ", local" : "");
}

namespace {

// Wraps a shard of the hidden states as a DTensor, after a check that all ranks have the same local shape.
at::Tensor as_checked_sequence(const at::Tensor& x, const MeshPtr& mesh, const Placement& layout,
                               const std::string& path) {
  try {
    return from_local(x, mesh, {layout}, {.run_check = true});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kShape) throw;
    raise(ErrorKind::kShape,
          "[parallel.style] {}: could not shard a tensor for sequence parallelism: the local shape on rank {} is [{}], "
          "and all ranks need the same shape. Pad the sequence, or hand over DTensors. {}",
          path, mesh->rank(), fmt::join(x.sizes(), ", "), error.what());
  }
}

}  // namespace

void RotaryEmbedParallel::apply(nn::Module& module, const StyleContext& context) const {
  mark_distributed_once(module, context.path);
  context.replicate_plain(module);
  const auto layout = Shard(options_.sequence_dim);
  module.register_forward_pre_hook(
      [mesh = context.mesh, path = context.path, layout](nn::Module&, nn::TensorRefs& inputs) {
        at::Tensor& x = first_tensor(inputs, path, "inputs");
        if (!is_dtensor(x)) x = as_checked_sequence(x, mesh, layout, path);
        for (size_t i = 1; i < inputs.size(); ++i) {
          if (inputs[i]->defined() && !is_dtensor(*inputs[i])) *inputs[i] = as_dtensor(*inputs[i], mesh, Replicate());
        }
      });
  module.register_forward_hook([local = options_.use_local_output](nn::Module&, nn::TensorRefs& outputs) {
    if (local) make_local(outputs);
  });
}

}  // namespace tessera
