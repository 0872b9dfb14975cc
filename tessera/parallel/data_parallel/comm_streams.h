// The streams on which the parameter groups of one FSDP root module, or one DDP module, launch communication: one
// stream for each purpose. A gather waits for no computation and no reduction. An all-reduce over replicas, and a copy
// to the host, wait only for the reduction before them. A CPU has no streams: everything runs in program order.
//
//   streams.gather.wait_current_stream();                  // after the writes to the shards
//   { const auto beside = streams.gather.make_current(); ... start the gather ... }
//   ... wait for it, copy the parameters out ...
//   streams.retire({gathered, input});                // gather-stream memory that the compute stream still reads
//
// Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/mesh/device_stream.h"

namespace tessera {

class CommStreams {
 public:
  CommStreams() = default;  // no streams
  explicit CommStreams(c10::Device device);
  ~CommStreams() { free_retired(); }
  CommStreams(const CommStreams&) = delete;
  CommStreams& operator=(const CommStreams&) = delete;

  DeviceStream gather;    // copies of shards, and starts of all-gathers
  DeviceStream reduce;    // reduce-scatters and waits for them; packing of gradients into buckets
  DeviceStream replicas;  // all-reduces over replicas and waits for them
  DeviceStream to_host;   // copies of gradients to the host

  // retire() keeps buffers that were allocated on the gather stream and whose last use was launched on this thread's
  // current stream. The next retire() frees them. A gather between the two calls is thus allocated other memory, and
  // its copies need not wait for that last use. At most two gathers have buffers at any time.
  void retire(std::vector<at::Tensor>&& buffers);
  void retire(c10::DataPtr&& memory);
  void free_retired();  // frees the retired buffers now, in the order of the gather stream

  // A second process group with the ranks of `group`, for reductions that must not wait for its gathers: on an
  // accelerator each group has a communicator and a stream of its own. On the CPU the function returns `group` itself.
  // COLLECTIVE over the group in the first call for it.
  std::shared_ptr<comm::Group> second_group(const std::shared_ptr<comm::Group>& group);

 private:
  c10::Device device_ = c10::Device(c10::kCPU);
  std::map<const comm::Group*, std::shared_ptr<comm::Group>> second_groups_;
  std::vector<at::Tensor> retired_;
  c10::DataPtr retired_memory_;
  DeviceEvent last_use_;  // of the retired buffers, on the stream that used them
};

}  // namespace tessera
