// The reduction of packed gradients in up to three stages: a reduce-scatter over a group (or an all-reduce, if each
// rank keeps the whole sum), an all-reduce over replicas, and a copy to the host.
//
//   stages.start({.group = shards, .replicas = replicas}, parts, pool, "layers.0");   // COLLECTIVE; returns at once
//   while (stages.advance("layers.0", at_end)) ...                                    // between other work
//   at::Tensor sum = stages.take_result();
//
// On an accelerator each stage runs on its own stream of CommStreams, and waits only for the stage before it. The
// advance() that ends the reduce-scatter also makes the compute stream wait for it, because the sent buffer is freed
// then. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/data_parallel/buffer_pool.h"
#include "tessera/parallel/data_parallel/comm_streams.h"

namespace tessera {

// The stages to run. A stage whose group is null or has one rank is skipped.
struct ReductionRoute {
  std::shared_ptr<comm::Group> group = {};
  bool scatters = true;  // false: each rank of `group` keeps the whole sum
  std::shared_ptr<comm::Group> replicas = {};
  bool to_host = false;
};

class ReductionStages {
 public:
  void set_streams(std::shared_ptr<CommStreams> streams) { streams_ = std::move(streams); }

  // Starts the first stage on `parts`. The stage waits for everything launched so far on this thread's current stream
  // and on the stream `reduce`. `subject` names the gradients in errors. COLLECTIVE over route.group.
  void start(ReductionRoute route, at::Tensor parts, BufferPool& pool, const std::string& subject);
  // Waits for the running stage and starts the next one. Returns false when no stage is left. The last stage may be a
  // copy of the result to host memory. While this copy is the running stage, advance() without `at_end` makes the
  // compute stream wait for the copy, frees the copied device buffer, and returns true. With `at_end` it returns false;
  // the host then waits for the copy in take_result(). COLLECTIVE over the replicas.
  bool advance(const std::string& subject, bool at_end);
  bool in_flight() const { return stage_ != Stage::kIdle; }
  // Returns the result; call it after advance() has returned false. The current stream of this thread, or the stream
  // `beside`, waits for the reduction. take_result() without an argument waits on the host until a result in host
  // memory is complete.
  at::Tensor take_result();
  at::Tensor take_result(const DeviceStream& beside);
  void drop();  // after an error: waits for the stage in flight and discards the gradients

 private:
  enum class Stage { kIdle, kGroup, kReplicas, kToHost };  // the stage in flight
  const DeviceStream& stream() const;
  void start_copy_to_host();

  std::shared_ptr<CommStreams> streams_ = std::make_shared<CommStreams>();
  ReductionRoute route_;
  Stage stage_ = Stage::kIdle;
  at::Tensor parts_;            // the sent buffer; undefined if the sum is in place
  at::Tensor output_;           // result of the last finished stage, or of the running stage
  at::Tensor host_;             // copy of output_ in host memory, complete after copied_
  DeviceEvent ended_, copied_;  // end of the last stage, end of the copy
  comm::PendingCollective pending_;
};

}  // namespace tessera
