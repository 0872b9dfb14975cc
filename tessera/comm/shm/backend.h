// The c10d back-end of a shared-memory group, for ranks on one host. comm::collectives and code written for c10d call
// it.
//
//   auto backend = c10::make_intrusive<ShmBackend>(memory, options, timeout);   // see handshake.h
//   backend->allreduce(tensors)->wait();
//
// Collectives: all-reduce, all-gather, reduce-scatter, broadcast, reduce, scatter, gather, all-to-all, barrier,
// coalesced forms, send and recv. Tensors must be contiguous and in CPU memory. Reductions: sum, avg, min, max and
// product of real dtypes (no avg of integers), bitwise operations of integers; values are combined in rank order. Each
// collective is COLLECTIVE over all ranks of the group; even the root of a broadcast waits until all ranks have called
// it. abort() may be called from any thread, the other functions from one thread at a time. Errors, thrown by the call
// or by Work::wait(): PeerFailed when the group was aborted or a rank has ended, TimedOut, Disagreement when ranks made
// different calls, Error kShape for wrong arguments.
#pragma once

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "tessera/comm/group/capabilities.h"
#include "tessera/comm/group/signature.h"
#include "tessera/comm/shm/engine.h"

namespace tessera::comm::shm {

class ShmBackend final : public c10d::Backend, public ComparesSignatures, public HasCapabilities {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Milliseconds = std::chrono::milliseconds;

  ShmBackend(std::shared_ptr<SharedMemory> memory, const ChannelOptions& options, Milliseconds timeout);
  ~ShmBackend() override;

  void announce(const Signature& signature) override { announced_ = signature; }

  Capabilities capabilities() const override { return {.reduces = true}; }

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("shm", timeout_); }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  bool supportsCoalescing() const override { return true; }
  // Allocation of shared buffers (shared_buffer.h). Supported when other processes can read such memory in place.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return channel_->shares_buffers(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}  // nothing to exchange: all ranks count from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // The arguments of start() besides the operation.
  struct WorkOptions {
    c10d::OpType type;
    Milliseconds timeout;
    Tensors tensors;       // kept alive until the operation has ended
    Tensors results = {};  // Work::result()
  };
  WorkPtr start(std::unique_ptr<Operation> operation, WorkOptions options);
  // Returns `work`. If startCoalescing() was called, also adds `work` to coalesced_, the works of the coalesced call.
  WorkPtr keep(WorkPtr work);
  WorkPtr start_message(c10d::OpType type, Tensors& tensors, int peer, int tag);
  // Runs `start_all` as one coalesced call.
  template <class Start>
  WorkPtr together(const Start& start_all);

  std::shared_ptr<Channel> channel_;
  std::shared_ptr<Engine> engine_;
  Milliseconds timeout_;
  uint64_t sequence_ = 0;
  Signature announced_;                            // of the next collective; hash 0: none
  std::optional<std::vector<WorkPtr>> coalesced_;  // set between startCoalescing() and endCoalescing()
};

}  // namespace tessera::comm::shm
