#include "tessera/parallel/parallelize_model.h"

namespace tessera {

void fully_shard_blocks(nn::Module& root, const std::vector<nn::Module*>& blocks, const FullyShardOptions& options) {
  // Blocks compute in param_dtype and hand it on; only the root's outputs are cast.
  FullyShardOptions inner = options;
  inner.mp_policy.output_dtype.reset();
  for (auto* block : blocks) fully_shard(*block, inner);
  FullyShardOptions outer = options;
  outer.reshard_after_forward.reset();
  fully_shard(root, outer);
}

}  // namespace tessera
