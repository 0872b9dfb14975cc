#include "tessera/parallel/data_parallel.h"

#include "tessera/base/error.h"

namespace tessera {

void fully_shard_blocks(nn::Module& root, const std::vector<nn::Module*>& blocks, const FullyShardOptions& options) {
  // Blocks pass their outputs to the next block in param_dtype; only the root casts its outputs.
  FullyShardOptions inner = options;
  inner.mp_policy.output_dtype.reset();
  for (auto* block : blocks) fully_shard(*block, inner);
  FullyShardOptions outer = options;
  outer.reshard_after_forward.reset();
  fully_shard(root, outer);
}

void data_parallel(nn::Module& root, const std::vector<nn::Module*>& blocks, const DataParallelOptions& options) {
  TESSERA_CHECK(options.mesh != nullptr, ErrorKind::kShape,
                "[parallel.data_parallel] no mesh given. Make one with init_device_mesh.");
  const auto& mesh = *options.mesh;
  const auto size_of = [&](const char* name) { return mesh.has_dim(name) ? mesh.size(mesh.dim_of(name)) : 0; };
  const int64_t replicas = size_of("dp_replicate"), shards = size_of("dp_shard");
  TESSERA_CHECK(replicas + shards > 0, ErrorKind::kShape,
                "[parallel.data_parallel] mesh {} has neither a dim dp_replicate nor dp_shard. Pass one of these dim "
                "names to init_device_mesh.",
                mesh.to_string());
  if (replicas > 0 && shards <= 1 && (replicas > 1 || shards == 0)) {
    auto replica = options.replicate;
    replica.mesh = mesh.slice({"dp_replicate"});
    replica.mp_policy = options.mp_policy;
    return replicate(root, replica);
  }
  auto shard = options.shard;
  shard.mesh = replicas > 1 ? mesh.slice({"dp_replicate", "dp_shard"}) : mesh.slice({"dp_shard"});
  shard.mp_policy = options.mp_policy;
  fully_shard_blocks(root, blocks, shard);
}

}  // namespace tessera
