// Hidden states and their gradients on their way between the stages of a pipeline.
//
// What a stage gives may be a DTensor of tensor parallelism: its local part travels, to the rank at the same place of
// the other stage. How it looks (dtype, sizes, placement) is said once for each shape of tokens, in a message before
// the first of them; gradients look the same. Messages of one direction, stage and micro-batch have a tag of their own.
// Belongs to one rank.
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

// How hidden states look.
struct WireForm {
  c10::ScalarType dtype = at::kFloat;
  std::vector<int64_t> local{}, whole{};
  std::optional<int64_t> shard_dim{};  // of a DTensor over the tensor-parallel mesh
  bool is_dtensor = false;
};

// A tensor that is still to come.
struct Arrival {
  at::Tensor part;  // local
  comm::Pending pending;
  WireForm form;
  MeshPtr tensor_parallel;
  at::Tensor take();  // waits
};

class Wire {
 public:
  // tensor_parallel: of the DTensors that travel; null: none do.
  Wire(std::shared_ptr<comm::Group> stages, MeshPtr tensor_parallel, c10::Device device)
      : group_(std::move(stages)), tensor_parallel_(std::move(tensor_parallel)), device_(device) {}

  struct Address {
    int rank = 0;                    // of the group
    int stage = 0, micro_batch = 0;  // that receives
  };
  // A copy is never made; `hidden` is kept until it has been read. tokens: sizes of the micro-batch's.
  void send_forward(const Address& to, const at::Tensor& hidden, c10::IntArrayRef tokens);
  Arrival receive_forward(const Address& from, c10::IntArrayRef tokens);
  // Of a gradient that goes back to where hidden states came from, and comes from where they went. Error kShape for one
  // that does not look like them.
  void send_backward(const Address& to, const at::Tensor& gradient, c10::IntArrayRef tokens);
  Arrival receive_backward(const Address& from, c10::IntArrayRef tokens);
  int rank() const { return group_->rank(); }

  void release_sent();  // those that have been read
  void finish();        // waits for all that was sent
  // After an error: what is under way, and all that peers would wait for, ends with one there.
  void break_off();

 private:
  int tag_of(const Address& address, int kind) const;
  void send(const at::Tensor& part, int to, int tag);
  static WireForm form_of(const at::Tensor& hidden);
  at::Tensor local_of(const at::Tensor& tensor, const WireForm& form) const;

  std::shared_ptr<comm::Group> group_;
  MeshPtr tensor_parallel_;
  c10::Device device_;
  std::map<std::pair<int, std::vector<int64_t>>, WireForm> sent_forms_, received_forms_;  // by receiving stage, tokens
  std::list<comm::Pending> sends_;
};

}  // namespace tessera::pipeline::detail
