#include "tessera/base/error.h"
#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/detail/adapter_placement.h"
#include "tessera/parallel/tensor_parallel/detail/layouts.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

using namespace detail;

void QKNormParallel::apply(nn::Module& module, const StyleContext& context) const {
  constexpr int64_t kHeads = 2;
  mark_distributed_once(module, context.path);
  context.replicate_plain(module);
  // Whether the input of the current call is a DTensor. If not, the output hook returns a plain tensor. One flag is
  // enough, because a module belongs to one rank and does not call itself.
  const auto distributed = std::make_shared<bool>(false);
  module.register_forward_pre_hook(
      [mesh = context.mesh, path = context.path, distributed](nn::Module&, nn::TensorRefs& inputs) {
        at::Tensor& x = first_tensor(inputs, path, "inputs");
        *distributed = is_dtensor(x);
        if (!*distributed) {
          x = as_dtensor(x, mesh, Shard(kHeads));
          return;
        }
        TESSERA_CHECK(placements(x) == Placements{Shard(kHeads)}, ErrorKind::kShape,
                      "[parallel.style] {}: found an input with placements {}, wanted (S(2)) for [B, T, heads, "
                      "head_dim]. Give the projection before it a column-wise style.",
                      path, to_string(placements(x)));
      });
  module.register_forward_hook([distributed](nn::Module&, nn::TensorRefs& outputs) {
    if (!*distributed) make_local(outputs);
  });
}

std::string ReplicatedKeyValue::describe() const { return fmt::format("ReplicatedKeyValue({} heads)", kv_heads_); }

void ReplicatedKeyValue::apply(nn::Module& module, const StyleContext& context) const {
  auto* linear = dynamic_cast<nn::Linear*>(&module);
  const int64_t ranks = context.mesh->size(), rows = linear == nullptr ? 0 : weight_sizes(*linear).first;
  TESSERA_CHECK(
      linear != nullptr && kv_heads_ > 0 && rows % kv_heads_ == 0 && ranks % kv_heads_ == 0, ErrorKind::kConfig,
      "[parallel.style] {}: ReplicatedKeyValue needs a Linear to {} key-value heads, and a number of ranks that is a "
      "multiple of them; found {} rows on {} ranks.",
      context.path, kv_heads_, rows, ranks);
  const int64_t head_dim = rows / kv_heads_;
  // Query heads are sharded in order, so groups of ranks / kv_heads neighbouring ranks read the same key-value head.
  const int64_t head = context.mesh->local_rank(0) * kv_heads_ / ranks;
  mark_distributed_once(module, context.path);
  for (auto& slot : module.own_parameters()) context.distribute(slot, Replicate());
  distribute_adapter(module, Replicate(), context);
  redistribute_first_input(module, context, Replicate(), Replicate());
  module.register_forward_hook([path = context.path, head, head_dim](nn::Module&, nn::TensorRefs& outputs) {
    // In backward, each rank has a gradient of `y` only for the key-value head that its query heads read. The gradient
    // placement Partial makes backward sum the gradients of all ranks, which gives the gradient of the whole `y`.
    at::Tensor& y = first_tensor(outputs, path, "outputs");
    y = to_local(redistribute_to(y, Replicate()), Placements{Partial()}).narrow(-1, head * head_dim, head_dim);
  });
}

}  // namespace tessera
