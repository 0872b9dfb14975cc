// Sends and receives hidden states and their gradients between the stages of a pipeline.
//
// A stage's output may be a DTensor of tensor parallelism. Then its local tensor is sent, to the rank with the same
// tensor-parallel index in the other stage. A header message before the first hidden state of each token shape
// announces the dtype, sizes and placement, which the gradient of the hidden state must have, too. Each direction,
// stage and micro-batch has its own message tag. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::pipeline::detail {

// The form of a hidden state: dtype, local and global sizes, placement.
struct HiddenStateForm {
  c10::ScalarType dtype = at::kFloat;
  std::vector<int64_t> local{}, whole{};  // local and global sizes
  std::optional<int64_t> shard_dim{};     // for a DTensor; none: replicated over the tensor-parallel mesh
  bool is_dtensor = false;
};

// A tensor that is being received.
struct PendingHiddenState {
  at::Tensor part;  // local tensor
  comm::PendingCollective pending;
  HiddenStateForm form;
  MeshPtr tensor_parallel;
  at::Tensor wait_for_tensor();  // waits and returns the tensor
};

class StageChannel {
 public:
  // tensor_parallel: the mesh of DTensors that are sent; null: only plain tensors are sent.
  StageChannel(std::shared_ptr<comm::Group> stages, MeshPtr tensor_parallel, c10::Device device)
      : group_(std::move(stages)), tensor_parallel_(std::move(tensor_parallel)), device_(device) {}

  struct Address {
    int rank = 0;                    // of the peer, in the group
    int stage = 0, micro_batch = 0;  // the stage that receives, and the micro-batch
  };
  // Send and receive hidden states. send_forward() sends `hidden` without a copy if it is contiguous, and keeps it
  // alive until the receiver has read it. tokens: the sizes of the micro-batch's tokens.
  void send_forward(const Address& to, const at::Tensor& hidden, c10::IntArrayRef tokens);
  PendingHiddenState receive_forward(const Address& from, c10::IntArrayRef tokens);
  // Send and receive the gradient of a hidden state: from the rank that received the hidden state to the rank that sent
  // it. The hidden state must have been sent and received before. send_backward() throws Error kShape if the gradient
  // differs from the hidden state in dtype or local sizes, or if only one of the two is a DTensor.
  void send_backward(const Address& to, const at::Tensor& gradient, c10::IntArrayRef tokens);
  PendingHiddenState receive_backward(const Address& from, c10::IntArrayRef tokens);
  int rank() const { return group_->rank(); }

  void release_sent();  // frees sent tensors that have been read
  void finish();        // waits for all sends
  // After an error: aborts the group, so that messages in flight, and the peers that wait for this rank, fail with an
  // error.
  void abort_group();

 private:
  int tag_of(const Address& address, int kind) const;
  void send(const at::Tensor& part, int to, int tag);
  static HiddenStateForm form_of(const at::Tensor& hidden);
  at::Tensor local_tensor_for_send(const at::Tensor& tensor, const HiddenStateForm& form) const;

  std::shared_ptr<comm::Group> group_;
  MeshPtr tensor_parallel_;
  c10::Device device_;
  // The HiddenStateForm (dtype, sizes, placement) of each hidden state that this rank sends or receives. The key in
  // both maps consists of the receiving stage and the sizes of the micro-batch's tokens.
  std::map<std::pair<int, std::vector<int64_t>>, HiddenStateForm> sent_forms_, received_forms_;
  std::list<comm::PendingCollective> sends_;
};

}  // namespace tessera::pipeline::detail
