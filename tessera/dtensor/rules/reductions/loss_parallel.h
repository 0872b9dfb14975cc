// Cross entropy over logits that are sharded on the class dim. The logits are not gathered.
//
//   {
//     LossParallel parallel;
//     auto loss = at::cross_entropy_loss(logits, targets);   // logits [B, C] or [B, C, ...], Shard(1): 3 all-reduces
//     loss.backward();                                       // no collective
//   }
//
// While an object of this class exists, log_softmax and nll_loss of DTensors need exactly one mesh dim that shards the
// class dim; the other mesh dims may be Shard or Replicate. The object is in force on its thread and in every backward
// that this thread runs. Objects may be nested. Shards of classes may be uneven or empty.
//
// Targets are class indices, replicated over the mesh dim that shards the classes. Targets are a DTensor, or a plain
// tensor with the same values on all ranks when the other mesh dims replicate the logits. Class weights are replicated
// or plain, or sharded like the classes. Results are Replicate; sums and means are Partial over mesh dims that shard
// the batch.
//
// The semantics are those of torch.distributed.tensor.parallel.loss_parallel, with three differences. Means are correct
// on any mesh. Gradients of log_softmax are correct for any later operation. A backward after the end of the scope is
// correct but gathers its operands. Errors have the kind kShape.
#pragma once

#include "tessera/comm/group/context_value.h"

namespace tessera {

class LossParallel {
 public:
  LossParallel();

 private:
  comm::ContextValue in_force_;
};
bool loss_parallel_enabled() noexcept;

}  // namespace tessera
