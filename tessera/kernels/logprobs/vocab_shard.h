// The columns of a sharded vocabulary that a rank holds, and the group that holds the whole vocabulary.
//
//   VocabShard part{.start = 0, .end = 76000, .group = mesh->group("tp")};
//   at::Tensor logprobs = distributed_logprob(logits, targets, part);       // logits [B, S, end - start]
//
// The ranks' column ranges may have any sizes (also zero) and any order. Together they cover [0, V), each column once.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/comm/group/group.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::kernels {

struct VocabShard {
  int64_t start = 0;                             // global id of the first column
  int64_t end = 0;                               // one past the global id of the last column
  std::shared_ptr<comm::Group> group = nullptr;  // null: this rank has all columns
  int size() const { return group ? group->size() : 1; }
};

// Returns this rank's part of a vocabulary of `vocabulary` columns that mesh dim `mesh_dim` shards as the placement
// Shard does; for mesh_dim -1, the whole vocabulary.
VocabShard vocab_shard_of(const DeviceMesh& mesh, int64_t mesh_dim, int64_t vocabulary);

}  // namespace tessera::kernels
