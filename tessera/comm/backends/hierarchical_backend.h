// The back-end of a group with several ranks on each of several hosts: shared memory inside a host, Gloo between them.
//
//   auto backend = c10::make_intrusive<HierarchicalBackend>(rank, hosts, HierarchicalGroups{inner, rail, whole});
//
// Every host has the same number of ranks, L. The ranks with the same position on their hosts form a rail, which is a
// Gloo group. An all-reduce first runs inside each host. Then the result is divided into L parts, and rail i
// all-reduces part i between the hosts. Then each part is broadcast inside each host. Reduce-scatter, all-gather and
// broadcast work in the same way. So each byte crosses the network once per host instead of once per rank. Values are
// summed first over the ranks of each host, in rank order, then over the hosts. This order is fixed, but differs from
// that of a group on one host. All other operations (scatter, all-to-all, send, recv, barrier, ...) use `whole`, a Gloo
// group of all ranks.
//
// Collectives are COLLECTIVE over the ranks of the group. As with Gloo, averages are not supported and half precision
// is rounded after every sum, so callers pass float32. One thread runs the four collectives above in the order of their
// start. The first failure aborts the groups `inner`, `rail` and `whole`, and later calls fail. abort() may be called
// from any thread, the other functions from one thread at a time.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "tessera/comm/group/capabilities.h"

namespace tessera::comm {

// The hosts of a group's ranks. A rank's "place" is its position among the ranks of its host.
class HostMap {
 public:
  // host_of: index of each rank's host. Hosts are numbered from 0 in the order of their first rank.
  explicit HostMap(const std::vector<int>& host_of);
  int hosts() const { return static_cast<int>(members_.size()); }
  const std::vector<int>& members(int host) const { return members_[host]; }  // ranks, in order
  int host_of(int rank) const { return host_of_[rank]; }
  int place_of(int rank) const { return place_of_[rank]; }
  // Whether there are several hosts with equal numbers of ranks, at least two each.
  bool is_even() const;

 private:
  std::vector<int> host_of_, place_of_;
  std::vector<std::vector<int>> members_;
};

struct HierarchicalGroups {
  c10::intrusive_ptr<c10d::Backend> inner;  // shared memory: the ranks of this host, in order of their place
  c10::intrusive_ptr<c10d::Backend> rail;   // Gloo: the ranks with this rank's place, in order of their host
  c10::intrusive_ptr<c10d::Backend> whole;  // Gloo: all ranks
};

class HierarchicalBackend final : public c10d::Backend, public HasCapabilities {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  HierarchicalBackend(int rank, const HostMap& hosts, HierarchicalGroups parts);
  ~HierarchicalBackend() override;

  Capabilities capabilities() const override { return {.scatters_sums = true}; }
  const std::string getBackendName() const override { return "mixed"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return parts_.whole->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return parts_.inner->supportsTensorAlloc(device); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return parts_.inner->getMemAllocator(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return parts_.inner->allocateTensor(size, options);
  }
  void abort() override;
  void shutdown() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  // Supports sum, min, max and product of the types that Gloo reduces.
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;

  // The operations below run on HierarchicalGroups::whole, the Gloo group of all ranks.
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return parts_.whole->reduce(tensors, options);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return parts_.whole->allgather(outputs, inputs, options);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return parts_.whole->gather(outputs, inputs, options);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    return parts_.whole->scatter(outputs, inputs, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    return parts_.whole->alltoall_base(output, input, output_splits, input_splits, options);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return parts_.whole->alltoall(outputs, inputs, options);
  }
  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    return parts_.whole->send(tensors, destination, tag);
  }
  WorkPtr recv(Tensors& tensors, int source, int tag) override { return parts_.whole->recv(tensors, source, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override { return parts_.whole->recvAnysource(tensors, tag); }
  WorkPtr barrier(const c10d::BarrierOptions& options) override { return parts_.whole->barrier(options); }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    parts_.whole->monitoredBarrier(options, wait_all_ranks);
  }

 private:
  class StageThread;
  WorkPtr start(c10d::OpType type, Tensors results, std::function<void()> stages);
  at::Tensor scratch(int which, int64_t count, const at::Tensor& like);

  HostMap hosts_;
  HierarchicalGroups parts_;
  std::unique_ptr<StageThread> stages_;
  at::Tensor scratch_[2];  // reused buffers of the stage thread
  uint64_t sequence_ = 0;
};

}  // namespace tessera::comm
