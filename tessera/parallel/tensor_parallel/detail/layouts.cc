#include "tessera/parallel/tensor_parallel/detail/layouts.h"

#include "tessera/base/error.h"

namespace tessera::detail {

Placement resolve_negative_dim(const Placement& placement, int64_t ndim) {
  Placement resolved = placement;
  if (resolved.is_any_shard() && resolved.dim < 0) resolved.dim += static_cast<int32_t>(ndim);
  return resolved;
}

// from_local without a shape assumes shards of equal size. With an uneven shard the global size must come from the
// caller.
at::Tensor as_dtensor(const at::Tensor& tensor, const MeshPtr& mesh, const Placement& layout, int64_t global_extent) {
  const Placement placed = resolve_negative_dim(layout, tensor.dim());
  if (global_extent < 0 || !placed.is_shard()) return from_local(tensor, mesh, {placed});
  auto shape = tensor.sizes().vec();
  shape[static_cast<size_t>(placed.dim)] = global_extent;
  return from_local(tensor.contiguous(), mesh, {placed}, FromLocalOptions::contiguous(std::move(shape)));
}

at::Tensor redistribute_to(const at::Tensor& dtensor, const Placement& target) {
  return redistribute(dtensor, {resolve_negative_dim(target, dtensor.dim())});
}

void redistribute_first_input(nn::Module& module, const StyleContext& context, const Placement& plain_layout,
                              const Placement& target, int64_t last_extent) {
  module.register_forward_pre_hook([mesh = context.mesh, path = context.path, plain_layout, target, last_extent](
                                       nn::Module&, nn::TensorRefs& inputs) {
    at::Tensor& x = first_tensor(inputs, path, "inputs");
    const bool shards_last =
        plain_layout.is_shard() && resolve_negative_dim(plain_layout, x.dim()).is_shard(x.dim() - 1);
    if (!is_dtensor(x)) x = as_dtensor(x, mesh, plain_layout, shards_last ? last_extent : -1);
    x = redistribute_to(x, target);
  });
}

void make_local(const nn::TensorRefs& tensors) {
  for (at::Tensor* each : tensors) {
    if (each->defined() && is_dtensor(*each)) *each = to_local(*each);
  }
}

at::Tensor& first_tensor(const nn::TensorRefs& tensors, const std::string& path, const char* list_name) {
  TESSERA_CHECK(!tensors.empty() && tensors[0]->defined(), ErrorKind::kShape,
                "[parallel.style] {}: found no tensor among its {}, its style needs one.", path, list_name);
  return *tensors[0];
}

std::string describe_layouts(const std::string& style, const LayoutOptions& options, const Placement& input,
                             const Placement& output) {
  return fmt::format("{}({} -> {}{})", style, to_string(options.input_layout.value_or(input)),
                     to_string(options.output_layout.value_or(output)), options.use_local_output ? ", local" : "");
}

void mark_distributed_once(nn::Module& module, const std::string& path) {
  TESSERA_CHECK(module.mark_distributed(), ErrorKind::kConfig,
                "[parallel.style] {}: a style that shards parameters was applied to this module already. Name it once "
                "in the plan.",
                path.empty() ? "the module" : path);
}

}  // namespace tessera::detail
