// Collectives over a Group. Each is COLLECTIVE over the group: all its ranks must call it, in the same order.
//
//   auto pending = comm::all_gather_into(*group, output, input, "model.layers.3");
//   ...                                    // computation that does not touch output or input
//   pending.wait();
//
// The functions that return a PendingCollective are asynchronous: the caller must not touch the buffers until wait()
// returns (PendingCollective keeps them alive). Tensors are plain (no DTensor), contiguous and on the group's device.
// Sizes, dtypes and operations must agree on all ranks. `subject` names the parameter or module that the call is for,
// and appears in error messages. In a group of one rank a collective is a local copy. Errors: kShape when sizes do not
// fit; wait() throws kComm for a failed peer, different calls, or a timeout. Semantics follow torch.distributed's
// collectives of the same names, with two differences: float16 and bfloat16 are summed in float32 and rounded once, and
// reduce_scatter_into of CPU tensors adds in a fixed order: rank order, or in a mixed group first inside each host
// (hierarchical_backend.h). Results of CPU tensors are the same in every run. The version counter of an output tensor
// goes up once, when the collective starts. Thread-safety: that of the group.
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

// Handle of a started collective, like c10d::Work. Movable. The destructor waits for a collective that was not waited
// for. While an exception unwinds the stack, the destructor first aborts the group's back-end, so that a failing rank
// does not wait for its peers.
class PendingCollective {
 public:
  PendingCollective();
  ~PendingCollective();
  PendingCollective(PendingCollective&&) noexcept;
  PendingCollective& operator=(PendingCollective&&) noexcept;
  // Blocks until the result is in the output tensor; for a device's tensors, orders the current stream after the
  // collective. Error kComm names group, operation, subject and reason. May be called again.
  void wait();
  bool done() const;  // never blocks

  struct CollectiveState;
  explicit PendingCollective(std::unique_ptr<CollectiveState> state);

 private:
  std::unique_ptr<CollectiveState> state_;
};

// Reduces `tensor` over the ranks, in place.
PendingCollective all_reduce(Group& group, const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                             std::string_view subject = "");
// Gathers the `input` of all ranks in `output`, in rank order. `output` holds size() times as many elements as `input`.
PendingCollective all_gather_into(Group& group, const at::Tensor& output, const at::Tensor& input,
                                  std::string_view subject = "");
// `input` holds size() times as many elements as `output`. Rank r receives the r-th part of the reduction.
PendingCollective reduce_scatter_into(Group& group, const at::Tensor& output, const at::Tensor& input,
                                      ReduceOp op = ReduceOp::kSum, std::string_view subject = "");
// Copies the root's `tensor` to all ranks, in place. `root` is a position in the group, not a global rank.
PendingCollective broadcast(Group& group, const at::Tensor& tensor, int root = 0, std::string_view subject = "");
// `inputs` is read on the root only. It holds one tensor per rank, each with as many elements as `output`.
PendingCollective scatter(Group& group, const at::Tensor& output, const std::vector<at::Tensor>& inputs, int root = 0,
                          std::string_view subject = "");
// The splits are numbers of rows along dim 0, one per rank. Empty splits mean equal parts.
PendingCollective all_to_all_single(Group& group, const at::Tensor& output, const at::Tensor& input,
                                    const std::vector<int64_t>& output_splits = {},
                                    const std::vector<int64_t>& input_splits = {}, std::string_view subject = "");
// Messages between two ranks. `destination` and `source` are positions in the group. The n-th send to a rank with a tag
// matches that rank's n-th recv with the tag.
PendingCollective send(Group& group, const at::Tensor& tensor, int destination, int tag = 0);
PendingCollective recv(Group& group, const at::Tensor& tensor, int source, int tag = 0);
// Returns once all ranks have called barrier().
void barrier(Group& group);
// A barrier over the back-end of an accelerator. It runs on the device after all work that is queued on the current
// stream, and the calling thread waits until the barrier has ended.
void barrier(Group& group, c10::Device device);
// Returns the byte strings of all ranks in rank order. The lengths may differ. Blocks.
std::vector<std::string> all_gather_bytes(Group& group, std::string_view bytes);
// Returns the root's bytes on every rank. Blocks.
std::string broadcast_bytes(Group& group, std::string_view bytes, int root = 0);

}  // namespace tessera::comm
