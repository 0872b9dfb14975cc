// Collectives over a Group. Each is COLLECTIVE over the group: all its ranks must call it, in the same order.
//
//   auto pending = comm::all_gather_into(*group, output, input, "model.layers.3");
//   ...                                    // computation that does not touch output or input
//   pending.wait();
//
// All are asynchronous: buffers belong to the collective until wait() returns (Pending keeps them alive).
// Tensors are plain, contiguous and on the group's device; sizes, dtypes and operations must agree on all
// ranks. `subject` names the parameter or module served, for error messages. A group of one rank copies.
// Errors: kShape for sizes that do not fit, kComm (from wait()) for a failed peer, a disagreement or a timeout.
// Semantics follow torch.distributed's collectives of the same names, but float16 and bfloat16 are summed in
// float32 and rounded once, and reduce_scatter_into adds in rank order. Results are the same in every run.
// A tensor's version counter goes up once, when the collective starts. Thread-safety: that of the group.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/comm/group/reduce_op.h"

namespace at {
class Tensor;
}
namespace c10d {
class Work;
}

namespace tessera::comm {

// What a started collective leaves behind. Movable; destroying one that was not waited for waits, and while an
// exception unwinds the stack breaks the group off first, so that a failing rank never waits for its peers.
class Pending {
 public:
  Pending();
  ~Pending();
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  // Blocks until the result is in place. Error kComm names group, operation, subject and reason. Idempotent.
  void wait();
  bool done() const;  // never blocks

  struct State;
  explicit Pending(std::unique_ptr<State> state);

 private:
  std::unique_ptr<State> state_;
};

// In place.
Pending all_reduce(Group& group, const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum, std::string_view subject = "");
// output holds size() times input's elements, rank by rank.
Pending all_gather_into(Group& group, const at::Tensor& output, const at::Tensor& input, std::string_view subject = "");
// input holds size() times output's elements; rank r receives the r-th part of the reduction.
Pending reduce_scatter_into(Group& group, const at::Tensor& output, const at::Tensor& input,
                            ReduceOp op = ReduceOp::kSum, std::string_view subject = "");
// In place; root is a position in the group.
Pending broadcast(Group& group, const at::Tensor& tensor, int root = 0, std::string_view subject = "");
// inputs is read on the root only and holds one tensor per rank, of output's size.
Pending scatter(Group& group, const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root = 0,
                std::string_view subject = "");
// Splits are element counts along dim 0; empty: equal splits.
Pending all_to_all_single(Group& group, const at::Tensor& output, const at::Tensor& input,
                          const std::vector<int64_t>& output_splits = {}, const std::vector<int64_t>& input_splits = {},
                          std::string_view subject = "");
Pending send(Group& group, const at::Tensor& tensor, int destination, int tag = 0);
Pending recv(Group& group, const at::Tensor& tensor, int source, int tag = 0);
// Returns once all ranks have called it.
void barrier(Group& group);
// The same over the back-end of an accelerator, behind all that its current stream was given: the host waits for it.
void barrier(Group& group, c10::Device device);
// Bytes of any length from each rank to all, in rank order.
std::vector<std::string> all_gather_bytes(Group& group, std::string_view bytes);
// The root's bytes on every rank.
std::string broadcast_bytes(Group& group, std::string_view bytes, int root = 0);

}  // namespace tessera::comm
