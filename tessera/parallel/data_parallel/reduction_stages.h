// Packed gradients on their way to who keeps them: summed over the ranks of a group (reduce-scattered, or all-reduced
// where each of them keeps all), the sum then over replicas, then copied to the host.
//
//   stages.start({.group = shards, .replicas = replicas}, parts, pool, "layers.0");   // COLLECTIVE; returns at once
//   while (stages.advance("layers.0", at_end)) ...                                    // between other work
//   at::Tensor sum = stages.take();
//
// On an accelerator the stages run beside what computes, each on its stream of CommStreams and behind the one before
// alone; what computes comes behind the reduce-scatter when the next stage starts, which frees what was sent. Belongs
// to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/data_parallel/buffer_pool.h"
#include "tessera/parallel/data_parallel/comm_streams.h"

namespace tessera {

// Stages that a null group, or one of one rank, has no part in are left out.
struct ReductionRoute {
  std::shared_ptr<comm::Group> group = {};
  bool scatters = true;  // else each rank of `group` keeps the whole sum
  std::shared_ptr<comm::Group> replicas = {};
  bool to_host = false;
};

class ReductionStages {
 public:
  void set_streams(std::shared_ptr<CommStreams> streams) { streams_ = std::move(streams); }

  // Of what this thread, or the stream `reduce`, was given so far. COLLECTIVE over the route's group.
  void start(ReductionRoute route, at::Tensor parts, BufferPool& pool, const std::string& subject);
  // Waits for the running stage and starts the next one; false when none was left. A copy to the host is waited for by
  // the host `at_end` alone; before, what computes comes behind it, which frees what was copied. COLLECTIVE over the
  // replicas.
  bool advance(const std::string& subject, bool at_end);
  bool in_flight() const { return stage_ != Stage::kIdle; }
  // The result, once advance() has said false. What this thread launches next comes behind it, or what `beside` is
  // given next, and the host has it where it ends there.
  at::Tensor take();
  at::Tensor take(const SideStream& beside);
  void drop();  // after an error: waits for what is in flight and forgets it

 private:
  enum class Stage { kIdle, kGroup, kReplicas, kToHost };  // what is in flight
  const SideStream& stream() const;
  void start_copy_to_host();

  std::shared_ptr<CommStreams> streams_ = std::make_shared<CommStreams>();
  ReductionRoute route_;
  Stage stage_ = Stage::kIdle;
  at::Tensor parts_;   // sent, unless the sum takes its place
  at::Tensor output_;  // of the last stage that ended, or of the running one
  at::Tensor host_;    // `output_` on the host, from `copied_` on
  StreamMark ended_, copied_;
  comm::Pending pending_;
};

}  // namespace tessera
