#include "tessera/parallel/data_parallel/reduction_stages.h"

#include <c10/core/GradMode.h>

#include <utility>

#include "tessera/base/error.h"
#include "tessera/mesh/host_memory.h"

namespace tessera {
namespace {

bool communicates(const std::shared_ptr<comm::Group>& group, const at::Tensor& tensor) {
  return group && group->size() > 1 && tensor.numel() > 0;
}

}  // namespace

// A reduce-scatter writes to a separate buffer. If an all-reduce over replicas follows, the buffer comes from the
// allocator of the replicas' group, if the group has one. Without a reduce-scatter the sum is computed in place, in
// `parts`.
void ReductionStages::start(ReductionRoute route, at::Tensor parts, BufferPool& pool, const std::string& subject) {
  route_ = std::move(route);
  stage_ = Stage::kGroup;
  const bool sums = communicates(route_.group, parts);
  if (sums && route_.scatters) {
    const c10::Device device = parts.device();
    c10::Allocator* const sent = route_.replicas ? route_.replicas->allocator(device.type()) : nullptr;
    output_ = pool.empty(parts.numel() / route_.group->size(), parts.scalar_type(), device, sent);
    parts_ = std::move(parts);
  } else {
    output_ = std::move(parts);
  }
  streams_->reduce.wait_current_stream();
  if (!sums) return;
  const auto beside = streams_->reduce.make_current();
  pending_ = route_.scatters ? comm::reduce_scatter_into(*route_.group, output_, parts_, comm::ReduceOp::kSum, subject)
                             : comm::all_reduce(*route_.group, output_, comm::ReduceOp::kSum, subject);
}

const DeviceStream& ReductionStages::stream() const {
  if (stage_ == Stage::kReplicas) return streams_->replicas;
  return stage_ == Stage::kToHost ? streams_->to_host : streams_->reduce;
}

// On an accelerator wait() with a stage's stream as the current stream makes only this stream wait for the collective;
// neither the host nor the compute stream waits. `parts_` was allocated on the compute stream, so the compute stream
// must wait for the reduce-scatter before `parts_` may be freed.
bool ReductionStages::advance(const std::string& subject, bool at_end) {
  if (!in_flight()) return false;
  // A copy to the host is in flight and need not be complete before the end of backward. The compute stream waits for
  // the copy once, so that the device buffer can be freed; the host waits for it in take_result().
  if (stage_ == Stage::kToHost && !at_end) {
    if (output_.defined()) {
      copied_.block_current_stream();
      output_.reset();
    }
    return true;
  }
  {
    const auto beside = stream().make_current();
    pending_.wait();
  }
  ended_ = stream().record_event();
  if (parts_.defined()) {
    ended_.block_current_stream();  // parts_ is memory of the current stream
    parts_.reset();
  }
  if (stage_ == Stage::kGroup && communicates(route_.replicas, output_)) {
    stage_ = Stage::kReplicas;
    streams_->replicas.wait_event(ended_);
    const auto beside = streams_->replicas.make_current();
    pending_ = comm::all_reduce(*route_.replicas, output_, comm::ReduceOp::kSum, subject);
    return true;
  }
  if (route_.to_host && stage_ != Stage::kToHost) {
    stage_ = Stage::kToHost;
    streams_->to_host.wait_event(ended_);
    start_copy_to_host();
    return true;
  }
  stage_ = Stage::kIdle;
  return false;
}

void ReductionStages::start_copy_to_host() {
  const c10::NoGradGuard no_grad;
  const c10::Device device = output_.device();
  host_ = pinned_empty(output_.numel(), output_.scalar_type(), device);
  const auto beside = streams_->to_host.make_current();
  host_.copy_(output_, /*non_blocking=*/true);
  copied_ = DeviceEvent::record_on_current(device);
}

// The current stream waits for `ended_`, the end of the last stage; for a result on the device this is enough. A result
// in host memory may be read by the CPU at once, so the host also waits for the copy to the host.
at::Tensor ReductionStages::take_result() {
  ended_.block_current_stream();
  if (!host_.defined()) return std::exchange(output_, {});
  copied_.wait();
  output_.reset();
  return std::exchange(host_, {});
}

at::Tensor ReductionStages::take_result(const DeviceStream& beside) {
  beside.wait_event(ended_);
  return std::exchange(output_, {});
}

// After an error no buffer may be freed while a stream still uses it. The compute stream therefore first waits for the
// streams of all stages.
void ReductionStages::drop() {
  if (in_flight()) {
    try {
      pending_.wait();
    } catch (const Error&) {  // the error that led here has been reported already
    }
  }
  for (const auto* stream : {&streams_->reduce, &streams_->replicas, &streams_->to_host}) {
    stream->block_current_stream();
  }
  if (stage_ == Stage::kToHost) copied_.wait();
  host_.reset();
  parts_.reset();
  output_.reset();
  stage_ = Stage::kIdle;
}

}  // namespace tessera
