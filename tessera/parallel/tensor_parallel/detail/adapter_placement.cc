#include "tessera/parallel/tensor_parallel/detail/adapter_placement.h"

#include "tessera/nn/linear/lora.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera::detail {

std::pair<int64_t, int64_t> weight_sizes(nn::Linear& linear) {
  if (const auto* const packed = nn::packed_weight_of(linear)) return {packed->out, packed->in};
  return {linear.weight.size(0), linear.weight.size(1)};
}

// The adapter computes B (A x), which is added to the product with the weight. With a row shard of the weight, B needs
// the same rows, and A is replicated. With a column shard, the input is sharded, so A needs the same columns; A x is
// then a partial sum, like the product with the weight.
void distribute_adapter(nn::Module& module, const Placement& weight, const StyleContext& context) {
  if (auto* const packed = nn::packed_weight_of(module)) {
    packed->mesh = context.mesh;
    packed->weight_placement = weight;
  }
  auto* linear = dynamic_cast<nn::LoraLinear*>(&module);
  if (linear == nullptr) return;
  const auto distribute = [&](nn::Module* part, const Placement& placement) {
    if (part == nullptr) return;
    context.distribute(part->own_parameters().front(), placement);
    if (context.styled != nullptr) context.styled->insert(part);
  };
  const bool rows = weight == Shard(0);
  distribute(linear->lora_A.get(), weight == Shard(1) ? Shard(1) : Replicate());
  distribute(linear->lora_B.get(), rows ? Shard(0) : Replicate());
  distribute(linear->lora_magnitude_vector.get(), rows ? Shard(0) : Replicate());
}

}  // namespace tessera::detail
