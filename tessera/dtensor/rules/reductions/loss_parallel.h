// Cross entropy over logits that are sharded on the class dim, without gathering them.
//
//   {
//     LossParallel parallel;
//     auto loss = at::cross_entropy_loss(logits, targets);   // logits [B, C] or [B, C, ...] with Shard(1): 3
//     all-reduces loss.backward();                                       // none
//   }
//
// While one lives, log_softmax over, and nll_loss of, DTensors on this thread need exactly one mesh dim that shards the
// class dim; the others may be Shard or Replicate. Rows of classes may be uneven or empty. Targets are class indices,
// replicated over the sharding mesh dim: a DTensor, or a plain tensor alike on all ranks where the other mesh dims
// replicate too. Class weights are replicated (or plain), or sharded with the classes. Results are Replicate; over mesh
// dims that shard the batch sums and means are Partial. Unlike upstream's, means are right on any mesh, gradients of
// log_softmax are right whatever is made of it, and a backward after its end is right too (but gathers). Semantics of
// torch.distributed.tensor.parallel.loss_parallel. Errors kShape. In force on its thread
// and in backwards that it runs; may be nested.
#pragma once

#include "tessera/comm/group/propagated.h"

namespace tessera {

class LossParallel {
 public:
  LossParallel();

 private:
  comm::Propagated in_force_;
};
bool loss_parallel_enabled() noexcept;

}  // namespace tessera
