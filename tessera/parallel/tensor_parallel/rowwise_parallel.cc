#include "tessera/base/error.h"
#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/detail/beside_weight.h"
#include "tessera/parallel/tensor_parallel/detail/layouts.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

using namespace detail;

RowwiseParallel::RowwiseParallel(const LayoutOptions& options) : options_(options) {}

std::string RowwiseParallel::describe() const {
  return "RowwiseParallel(" +
         describe_layouts(options_.input_layout.value_or(Shard(-1)), options_.output_layout.value_or(Replicate()),
                          options_.use_local_output) +
         ")";
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
  claim(module, context.path);
  const int64_t in_features = embedding ? -1 : weight_sizes(*linear).second;
  for (auto& slot : module.own_parameters()) {
    const bool columns = !embedding && slot.parameter.dim() == 2;
    context.distribute(slot, columns ? Shard(1) : embedding ? Shard(0) : Replicate());
  }
  distribute_beside(module, Shard(1), context);
  const auto desired = embedding ? Replicate() : Shard(-1);
  module.register_forward_pre_hook(
      [mesh = context.mesh, path = context.path, declared, desired, in_features](nn::Module&, nn::TensorRefs& inputs) {
        at::Tensor& x = first_of(inputs, path, "inputs");
        const bool last = declared.is_shard() && on_dims(declared, x.dim()).is_shard(x.dim() - 1);
        x = brought(x, mesh, declared, desired, last ? in_features : -1);
      });
  const auto wanted = options_.output_layout.value_or(Replicate());
  module.register_forward_hook(
      [path = context.path, wanted, local = options_.use_local_output](nn::Module&, nn::TensorRefs& outputs) {
        at::Tensor& y = first_of(outputs, path, "outputs");
        y = laid_out(y, wanted);
        if (local) y = to_local(y);
      });
}

}  // namespace tessera
