#include "tessera/kernels/logprobs/vocab_shard.h"

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::kernels {

VocabShard vocab_shard_of(const DeviceMesh& mesh, int64_t mesh_dim, int64_t vocabulary) {
  if (mesh_dim < 0) return {.start = 0, .end = vocabulary};
  const auto range = local_range(vocabulary, mesh.size(mesh_dim), mesh.local_rank(mesh_dim));
  return {.start = range.offset, .end = range.offset + range.size, .group = mesh.group(mesh_dim)};
}

}  // namespace tessera::kernels
