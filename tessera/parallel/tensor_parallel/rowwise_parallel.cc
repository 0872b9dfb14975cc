#include "tessera/base/error.h"
#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/detail/adapter_placement.h"
#include "tessera/parallel/tensor_parallel/detail/layouts.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

using namespace detail;

std::string RowwiseParallel::describe() const {
  return describe_layouts("RowwiseParallel", options_, Shard(-1), Replicate());
}

void RowwiseParallel::apply(nn::Module& module, const StyleContext& context) const {
  const bool embedding = dynamic_cast<nn::Embedding*>(&module) != nullptr;
  auto* linear = dynamic_cast<nn::Linear*>(&module);
  TESSERA_CHECK(
      embedding || linear != nullptr, ErrorKind::kConfig,
      "[parallel.style] {}: RowwiseParallel currently only support nn.Linear and nn.Embedding! Give it another style.",
      context.path);
  const auto declared = options_.input_layout.value_or(Shard(-1));
  TESSERA_CHECK(!embedding || declared.is_replicate(), ErrorKind::kConfig,
                "[parallel.style] {}: RowwiseParallel of an embedding needs input_layout Replicate, found {}.",
                context.path, to_string(declared));
  mark_distributed_once(module, context.path);
  // The global size of the input's last dim is that of the weight's dim 1. It is read before the weight is sharded.
  const int64_t in_features = embedding ? -1 : weight_sizes(*linear).second;
  for (auto& slot : module.own_parameters()) {
    const bool columns = !embedding && slot.parameter.dim() == 2;
    context.distribute(slot, columns ? Shard(1) : embedding ? Shard(0) : Replicate());
  }
  // The product with a column shard of the weight is a partial sum. The output hook redistributes it: an all-reduce to
  // Replicate, a reduce-scatter to Shard.
  distribute_adapter(module, Shard(1), context);
  redistribute_first_input(module, context, declared, embedding ? Replicate() : Shard(-1), in_features);
  const auto target_layout = options_.output_layout.value_or(Replicate());
  module.register_forward_hook(
      [path = context.path, target_layout, local = options_.use_local_output](nn::Module&, nn::TensorRefs& outputs) {
        at::Tensor& y = first_tensor(outputs, path, "outputs");
        y = redistribute_to(y, target_layout);
        if (local) y = to_local(y);
      });
}

}  // namespace tessera
