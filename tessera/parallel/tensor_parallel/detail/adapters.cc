#include "tessera/parallel/tensor_parallel/detail/adapters.h"

#include "tessera/nn/lora.h"

namespace tessera::detail {

void distribute_adapters(nn::Module& module, const Placement& weight, const StyleContext& context) {
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
