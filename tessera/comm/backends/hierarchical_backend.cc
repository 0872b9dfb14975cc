#include "tessera/comm/backends/hierarchical_backend.h"

#include <ATen/ops/empty.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/backends/local_reduction.h"
#include "tessera/comm/group/wait_all.h"

namespace tessera::comm {
namespace {

using Tensors = HierarchicalBackend::Tensors;

// Tensors of fewer bytes use one rail: for these the latency matters, not the bandwidth of several rails.
constexpr int64_t kOneRail = 64 * 1024;

class StagedWork final : public c10d::Work {
 public:
  StagedWork(int rank, c10d::OpType type, uint64_t sequence, Tensors results, std::function<void()> stages)
      : Work(rank, type), sequence_(sequence), results_(std::move(results)), stages_(std::move(stages)) {}
  // Runs the stages and completes the work. If a stage throws, the work is completed with this exception. Returns true
  // when no stage has thrown.
  bool run() noexcept {
    const auto stages = std::move(stages_);
    try {
      stages();
      finish();
      return true;
    } catch (...) {
      finish(std::current_exception());
      return false;
    }
  }
  std::vector<at::Tensor> result() override { return results_; }
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  uint64_t sequence_;
  Tensors results_;
  std::function<void()> stages_;
};

ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  for (const auto known : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    if (to_c10d_op(known) == static_cast<c10d::ReduceOp::RedOpType>(op)) return known;
  }
  raise(ErrorKind::kShape, "[comm.mixed] reduce_scatter: wanted sum, min, max or product");
}

}  // namespace

// ---- HostMap: the hosts, and each rank's place on its host ----

HostMap::HostMap(const std::vector<int>& host_of) : host_of_(host_of) {
  for (int rank = 0; rank < static_cast<int>(host_of.size()); ++rank) {
    const auto host = static_cast<size_t>(host_of[rank]);
    if (host >= members_.size()) members_.resize(host + 1);
    place_of_.push_back(static_cast<int>(members_[host].size()));
    members_[host].push_back(rank);
  }
}

bool HostMap::is_even() const {
  return hosts() > 1 && members_[0].size() > 1 &&
         std::ranges::all_of(members_, [&](const auto& ranks) { return ranks.size() == members_[0].size(); });
}

// ---- the stage thread ----

// Runs the started calls one after the other, in the order of start(): all stages of a call before the next call. All
// ranks start their collectives in the same order, so the stages of different calls cannot wait for one another.
class HierarchicalBackend::StageThread {
 public:
  explicit StageThread(std::function<void()> on_failure) : on_failure_(std::move(on_failure)) {}

  void start(const c10::intrusive_ptr<StagedWork>& work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(work);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_one();
  }
  // Runs all started calls to their end, then ends the thread.
  void shut_down() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    ::pthread_setname_np(::pthread_self(), "tessera mixed");
    const at::NoGradGuard no_grad;
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!work->run()) on_failure_();
      lock.lock();
    }
  }

  std::function<void()> on_failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<StagedWork>> queue_;
  bool stop_ = false;
  std::thread thread_;
};

HierarchicalBackend::HierarchicalBackend(int rank, const HostMap& hosts, HierarchicalGroups parts)
    : Backend(rank, hosts.hosts() * static_cast<int>(hosts.members(0).size())),
      hosts_(hosts),
      parts_(std::move(parts)),
      stages_(std::make_unique<StageThread>([this] { abort(); })) {
  TESSERA_CHECK(hosts_.is_even(), ErrorKind::kInternal, "[comm.mixed] hosts with different numbers of ranks");
}

HierarchicalBackend::~HierarchicalBackend() { HierarchicalBackend::shutdown(); }

void HierarchicalBackend::shutdown() {
  stages_->shut_down();
  for (const auto& part : {parts_.inner, parts_.rail, parts_.whole}) part->shutdown();
}

void HierarchicalBackend::abort() {
  for (const auto& part : {parts_.inner, parts_.rail, parts_.whole}) part->abort();
}

void HierarchicalBackend::setTimeout(std::chrono::milliseconds timeout) {
  for (const auto& part : {parts_.inner, parts_.rail, parts_.whole}) part->setTimeout(timeout);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::start(c10d::OpType type, Tensors results,
                                                        std::function<void()> stages) {
  const auto work = c10::make_intrusive<StagedWork>(rank_, type, ++sequence_, std::move(results), std::move(stages));
  stages_->start(work);
  return work;
}

// Returns buffer 0 or 1 with room for `count` elements. The buffers are reused, because page faults of fresh memory
// cost far more than a copy into it. Only the stage thread may use them.
at::Tensor HierarchicalBackend::scratch(int which, int64_t count, const at::Tensor& like) {
  at::Tensor& kept = scratch_[which];
  const int64_t bytes = count * static_cast<int64_t>(like.element_size());
  if (!kept.defined() || kept.numel() < bytes) {
    kept = parts_.inner->allocateTensor(bytes, like.options().dtype(at::kByte));
  }
  return kept.narrow(0, 0, bytes).view(like.scalar_type());
}

// The stages of an all-reduce: an all-reduce inside the host; an all-reduce of segment i between the hosts by rail i
// (the i-th ranks of all hosts); a broadcast of segment i inside each host from the host's i-th rank.
HierarchicalBackend::WorkPtr HierarchicalBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  TESSERA_CHECK(tensors.size() == 1 && tensors[0].is_contiguous(), ErrorKind::kShape,
                "[comm.mixed] all_reduce: wanted one contiguous tensor");
  const auto flat = tensors[0].view({-1});
  return start(c10d::OpType::ALLREDUCE, tensors, [this, flat, options] {
    Tensors whole = {flat};
    parts_.inner->allreduce(whole, options)->wait();
    const int64_t rails = static_cast<int64_t>(flat.nbytes()) < kOneRail ? 1 : parts_.inner->getSize();
    const auto segments = flat.tensor_split(rails, 0);
    const int place = hosts_.place_of(rank_);
    if (place < rails && segments[place].numel() > 0) {
      Tensors own = {segments[place]};
      parts_.rail->allreduce(own, options)->wait();
    }
    std::vector<WorkPtr> works;
    for (int from = 0; from < rails; ++from) {
      if (segments[from].numel() == 0) continue;
      Tensors part = {segments[from]};
      c10d::BroadcastOptions broadcast;
      broadcast.rootRank = from;
      works.push_back(parts_.inner->broadcast(part, broadcast));
    }
    wait_all(works);
  });
}

// The stages of a broadcast: a broadcast between the hosts along the root's rail; a broadcast inside each host from its
// rank on that rail.
HierarchicalBackend::WorkPtr HierarchicalBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return start(c10d::OpType::BROADCAST, tensors, [this, tensors, options]() mutable {
    const int root = static_cast<int>(options.rootRank), place = hosts_.place_of(root);
    c10d::BroadcastOptions stage = options;
    if (hosts_.place_of(rank_) == place) {
      stage.rootRank = hosts_.host_of(root);
      parts_.rail->broadcast(tensors, stage)->wait();
    }
    stage.rootRank = place;
    parts_.inner->broadcast(tensors, stage)->wait();
  });
}

// The stages of an all-gather: an all-gather between the hosts along each rail; then, for each host, an all-gather
// inside this rank's host of the inputs that came from that host.
HierarchicalBackend::WorkPtr HierarchicalBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::AllgatherOptions& options) {
  auto out = output.view({size_, -1}), in = input.view({-1});
  return start(c10d::OpType::_ALLGATHER_BASE, {output}, [this, out, in, options]() mutable {
    const int hosts = hosts_.hosts();
    auto of_rail = scratch(0, in.numel() * hosts, in);
    parts_.rail->_allgather_base(of_rail, in, options)->wait();
    std::vector<WorkPtr> works;
    for (int host = 0; host < hosts; ++host) {
      TensorLists lists(1);
      for (const int rank : hosts_.members(host)) lists[0].push_back(out[rank]);
      Tensors part = {of_rail.narrow(0, host * in.numel(), in.numel())};
      works.push_back(parts_.inner->allgather(lists, part, options));
    }
    wait_all(works);
  });
}

// The stages of a reduce-scatter: for each target host, a reduce-scatter inside this rank's host; an all-to-all of the
// results along each rail; then this rank reduces the received results in the order of the hosts.
HierarchicalBackend::WorkPtr HierarchicalBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                       const c10d::ReduceScatterOptions& options) {
  const auto op = reduce_op_of(options.reduceOp);
  auto out = output.view({-1}), in = input.view({size_, -1});
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, [this, out, in, options, op]() mutable {
    const int hosts = hosts_.hosts();
    const int64_t count = out.numel();
    // sums[host] is for the rank of `host` that is on this rank's rail (the same position in its host). It is the
    // reduction, over the ranks of this rank's host, of their inputs for that rank.
    auto sums = scratch(0, count * hosts, out);
    std::vector<WorkPtr> works;
    for (int host = 0; host < hosts; ++host) {
      TensorLists lists(1);
      for (const int rank : hosts_.members(host)) lists[0].push_back(in[rank]);
      Tensors part = {sums.narrow(0, host * count, count)};
      works.push_back(parts_.inner->reduce_scatter(part, lists, options));
    }
    wait_all(works);
    auto received = scratch(1, count * hosts, out);
    auto received_bytes = received.view(at::kByte), sent_bytes = sums.view(at::kByte);
    std::vector<int64_t> equal_out, equal_in;
    parts_.rail->alltoall_base(received_bytes, sent_bytes, equal_out, equal_in)->wait();
    reduce_parts(out, received.view({hosts, count}), op);
  });
}

}  // namespace tessera::comm
