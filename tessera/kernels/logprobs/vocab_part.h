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

namespace tessera {

struct VocabPart {
  int64_t start = 0;                             // global id of the first column
  int64_t end = 0;                               // one past that of the last
  std::shared_ptr<comm::Group> group = nullptr;  // null: this rank has all columns
  int size() const { return group ? group->size() : 1; }
};

}  // namespace tessera
