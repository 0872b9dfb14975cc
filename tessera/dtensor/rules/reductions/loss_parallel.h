// Cross entropy over logits that are sharded on the class dim. The logits are not gathered.
//
//   {
//     LossParallel parallel;
//     auto loss = at::cross_entropy_loss(logits, targets);   // logits [B, C] or [B, C, ...], Shard(1): 3 all-reduces
//     loss.backward();                                       // no collective
//   }
//
// While an object of this class exists, log_softmax and nll_loss of DTensors need exactly one mesh dim that shards the
// class dim; the other mesh dims may be Shard or Replicate. The object applies to its thread and to every backward that
// this thread runs. Objects may be nested. Shards of classes may be uneven or empty.
//
// Targets are class indices, replicated over the mesh dim that shards the classes. Targets are a DTensor, or a plain
// tensor with the same values on all ranks when the other mesh dims replicate the logits. Class weights are a plain
// tensor, a replicated DTensor, or a DTensor that is sharded like the classes. The loss is Replicate on the mesh dim
// that shards the classes. On mesh dims that shard the batch a sum or mean is Partial, and a loss for each row is
// sharded.
//
// The semantics are those of torch.distributed.tensor.parallel.loss_parallel, with three differences. Means are correct
// on any mesh. Gradients of log_softmax are correct also if an operation other than nll_loss uses the result. A
// backward that runs after the object was destroyed is correct but gathers the logits. Errors have the kind kShape.
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
