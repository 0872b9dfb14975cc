#include "tessera/base/error.h"
#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/detail/adapter_placement.h"
#include "tessera/parallel/tensor_parallel/detail/layouts.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

using namespace detail;

std::string ColwiseParallel::describe() const {
  return describe_layouts("ColwiseParallel", options_, Replicate(), Shard(-1));
}

void ColwiseParallel::apply(nn::Module& module, const StyleContext& context) const {
  const bool embedding = dynamic_cast<nn::Embedding*>(&module) != nullptr;
  TESSERA_CHECK(
      embedding || dynamic_cast<nn::Linear*>(&module) != nullptr || dynamic_cast<nn::Head*>(&module) != nullptr,
      ErrorKind::kConfig,
      "[parallel.style] {}: ColwiseParallel currently only support nn.Linear and nn.Embedding! Give it another style.",
      context.path);
  mark_distributed_once(module, context.path);
  for (auto& slot : module.own_parameters()) context.distribute(slot, embedding ? Shard(1) : Shard(0));
  distribute_adapter(module, Shard(0), context);
  redistribute_first_input(module, context, options_.input_layout.value_or(Replicate()), Replicate());
  const auto target_layout = options_.output_layout.value_or(Shard(-1));
  module.register_forward_hook(
      [path = context.path, target_layout, local = options_.use_local_output](nn::Module&, nn::TensorRefs& outputs) {
        at::Tensor& y = first_tensor(outputs, path, "outputs");
        if (!is_dtensor(y)) return;  // the log-probs of a head, which are plain and complete on every rank
        // A head that is called with labels returns a scalar loss, which has no dim to shard. It becomes a plain scalar
        // that is complete on every rank.
        const bool loss = y.dim() == 0;
        y = redistribute_to(y, loss ? Replicate() : target_layout);
        if (local || loss) y = to_local(y);
      });
}

}  // namespace tessera
