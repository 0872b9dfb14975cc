// Where the groups below one root launch what is not to come behind all that computes, each kind on a stream of its
// own: so that a gather waits for no computation and no reduction, and a sum over replicas or a copy to the host for
// nothing but the reduction before it. On the CPU there are no such streams, and everything runs in its place.
//
//   streams.gather.follow_current();                  // where the shards have been written to
//   { const auto beside = streams.gather.enter(); ... start the gather ... }
//   ... wait for it, lay the parameters out ...
//   streams.retire({gathered, input});                // of that stream; what is computing still reads them
//
// Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/mesh/side_stream.h"

namespace tessera {

class CommStreams {
 public:
  CommStreams() = default;  // none
  explicit CommStreams(c10::Device device);
  ~CommStreams() { free_retired(); }
  CommStreams(const CommStreams&) = delete;
  CommStreams& operator=(const CommStreams&) = delete;

  SideStream gather;    // copies of shards, and the starts of all-gathers
  SideStream reduce;    // the starts of reduce-scatters, and the waits for them; what packs gradients into buckets
  SideStream replicas;  // the same of sums over replicas
  SideStream to_host;   // copies of gradients

  // Buffers of the gather stream that this thread's current one has been given the last use of. They are freed when the
  // next ones come, so that the copies of the gather in between had other memory and did not wait. Thus two gathers,
  // and no more, have buffers at a time.
  void retire(std::vector<at::Tensor>&& buffers);
  void retire(c10::DataPtr&& memory);
  void free_retired();

  // Another group of the ranks of `group`, for reductions that are not to wait for its gathers: on an accelerator each
  // group has a communicator and a stream of its own. On the CPU `group` itself. COLLECTIVE over the group when it is
  // asked for the first time.
  std::shared_ptr<comm::Group> second_group(const std::shared_ptr<comm::Group>& group);

 private:
  c10::Device device_ = c10::Device(c10::kCPU);
  std::map<const comm::Group*, std::shared_ptr<comm::Group>> second_groups_;
  std::vector<at::Tensor> retired_;
  c10::DataPtr retired_memory_;
  StreamMark last_use_;
};

}  // namespace tessera
