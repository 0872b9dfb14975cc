// Which columns of the vocabulary a rank's logits are, and who has the others.
//
//   VocabPart part{.start = 0, .end = 76000, .group = mesh->group("tp")};
//   at::Tensor logprobs = distributed_logprob(logits, targets, part);       // logits [B, S, end - start]
//
// The ranks' columns may be of any sizes, also none, and lie in any order; together they are [0, V), each once.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/comm/group/group.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::kernels {

struct VocabPart {
  int64_t start = 0;                             // global id of the first column
  int64_t end = 0;                               // one past that of the last
  std::shared_ptr<comm::Group> group = nullptr;  // null: this rank has all columns
  int size() const { return group ? group->size() : 1; }
};

// The part of this rank where mesh dim `mesh_dim` cuts a vocabulary of so many as Shard does; all of it for -1.
VocabPart part_over(const DeviceMesh& mesh, int64_t mesh_dim, int64_t vocabulary);

}  // namespace tessera::kernels
