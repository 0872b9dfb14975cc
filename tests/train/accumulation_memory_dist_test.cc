// Tests that a rank's peak memory does not grow with the number of micro-batches in a step.
#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>

#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/models/files/weights.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/step/step.h"
#include "tests/models/tiny.h"
#include "tests/support/ranks.h"

namespace tessera::train {
namespace {

// Bytes of tensors that one rank has allocated: the current value and the maximum.
struct Account {
  std::atomic<int64_t> now = 0, most = 0;
  void add(int64_t bytes) {
    const int64_t sum = now += bytes;
    int64_t before = most;
    while (before < sum && !most.compare_exchange_weak(before, sum)) {
    }
  }
};

// The CPU's usual allocator, which also counts bytes in the account of the allocating thread.
class AccountedMemory final : public c10::Allocator {
 public:
  static AccountedMemory& instance() {  // outlives all memory that it allocates
    static auto* const memory = new AccountedMemory;
    return *memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = usual_->raw_allocate(bytes);
    if (data != nullptr && account) {
      account->add(static_cast<int64_t>(bytes));
      const std::lock_guard lock(mutex_);
      pieces_.insert_or_assign(data, Piece{static_cast<int64_t>(bytes), account});
    }
    return {data, data, &give_back, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static thread_local std::shared_ptr<Account> account;  // account of this thread's rank; null: memory is not counted

 private:
  struct Piece {
    int64_t bytes;
    std::shared_ptr<Account> account;
  };
  static void give_back(void* data) {
    auto& self = instance();
    {
      const std::lock_guard lock(self.mutex_);
      if (const auto found = self.pieces_.find(data); found != self.pieces_.end()) {
        found->second.account->add(-found->second.bytes);
        self.pieces_.erase(found);
      }
    }
    self.usual_->raw_deallocate(data);
  }

  c10::Allocator* const usual_ = c10::GetCPUAllocator();
  std::mutex mutex_;
  std::unordered_map<void*, Piece> pieces_;
};
thread_local std::shared_ptr<Account> AccountedMemory::account;

class AccumulationMemory : public ::testing::Test {
 protected:
  AccumulationMemory() { c10::SetCPUAllocator(&AccountedMemory::instance()); }
  ~AccumulationMemory() override { c10::SetCPUAllocator(usual_); }

 private:
  c10::Allocator* const usual_ = c10::GetCPUAllocator();
};

// Memory that this rank allocates on its device from now on. On the CPU the rank has its own account.
class MemoryOfRank {
 public:
  MemoryOfRank() {
    if (device_.is_cpu()) {
      AccountedMemory::account = std::make_shared<Account>();
    } else {
      before_ = bytes().current;
    }
  }
  ~MemoryOfRank() { AccountedMemory::account.reset(); }
  void forget_peak() {
    if (device_.is_cpu()) {
      AccountedMemory::account->most = AccountedMemory::account->now.load();
    } else {
      at::accelerator::resetPeakStats(device_.index());
    }
  }
  int64_t peak() const { return device_.is_cpu() ? AccountedMemory::account->most.load() : bytes().peak - before_; }

 private:
  c10::CachingAllocator::Stat bytes() const {
    return at::accelerator::getDeviceStats(device_.index()).allocated_bytes[0];
  }

  const c10::Device device_ = testing::test_device();
  int64_t before_ = 0;
};

struct StepMemory {
  int64_t peak = 0;    // of a step after the first step
  int64_t shards = 0;  // bytes of this rank's gradients
  int64_t layer = 0;   // bytes of the largest layer's unsharded gradients
};

constexpr int64_t kRowLength = 8;

// The model has twelve layers and few tokens, so that parameters and gradients are most of the memory.
StepMemory memory_of_a_step(const std::shared_ptr<comm::World>& world, const RunLayout& layout, int64_t micro_batches,
                            StepOptions options = {}) {
  MemoryOfRank memory;
  const RunMesh place(layout, testing::test_device_type(), world);
  const auto config = ModelConfig::parse(
      testing::tiny_config(
          R"("vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 12)"),
      "tiny");
  const auto model = make_parallel_model(config, at::kFloat, {.mesh = place.mesh()});
  init_weights(*model, 5);
  const auto optimizer = optim::make_adamw(*model, {.lr = 0.001});
  options.is_counted = place.is_counted();
  TrainStep step(*model, *optimizer, world->group(), options);
  std::vector<data::Batch> batches;
  for (int64_t i = 0; i < micro_batches; ++i) {
    const auto tokens = testing::tiny_tokens(1, kRowLength).cpu().add(17 * place.data_rank() + i).remainder_(256);
    batches.push_back(data::make_batch(tokens, testing::next_labels(tokens), at::arange(kRowLength).unsqueeze(0),
                                       at::zeros_like(tokens)));
  }
  step.run(batches, 0.001);
  StepMemory found;
  memory.forget_peak();
  step.run(batches, 0.001);
  found.peak = memory.peak();
  for (const auto& parameter : model->parameters()) found.shards += static_cast<int64_t>(to_local(parameter).nbytes());
  for (const auto& block : model->blocks()) {
    int64_t bytes = 0;
    for (const auto& parameter : block->parameters()) bytes += static_cast<int64_t>(to_local(parameter).nbytes());
    found.layer = std::max(found.layer, bytes * layout.dp_shard);
  }
  return found;
}

void on_ranks(int64_t count, const testing::RankBody& body) {
  comm::run_thread_ranks(static_cast<int>(count),
                         [&](const std::shared_ptr<comm::World>& world) {
                           testing::use_device_of_rank(world->rank());
                           body(world);
                         },
                         {.backend = "gloo"});  // with gloo all memory on the CPU comes from the usual allocator
}

// Between micro-batches a rank holds its shards of the gradients. With one micro-batch these shards exist only after
// backward. Buffers are counted, too, also buffers that wait for reuse. About two layers of buffers may differ, because
// a collective may free its input early or late. Unsharded gradients would need much more memory.
TEST_F(AccumulationMemory, PeakDoesNotGrowWithMicroBatches) {
  for (const auto& layout :
       {RunLayout{.dp_shard = 4}, RunLayout{.dp_shard = 2, .tp = 2}, RunLayout{.dp_replicate = 2, .dp_shard = 2}}) {
    on_ranks(4, [&](const std::shared_ptr<comm::World>& world) {
      const auto one = memory_of_a_step(world, layout, 1), two = memory_of_a_step(world, layout, 2),
                 eight = memory_of_a_step(world, layout, 8),
                 deferred = memory_of_a_step(world, layout, 2, {.defer_gradient_sync = true});
      if (world->rank() == 0) {
        fmt::print(
            "hsdp {} x {}, tp {}: {} bytes with one micro-batch, {} with two, {} with eight, {} deferred of two; "
            "shards of {}, layers of {}\n",
            layout.dp_replicate, layout.dp_shard, layout.tp, one.peak, two.peak, eight.peak, deferred.peak, one.shards,
            one.layer);
      }
      EXPECT_LE(eight.peak, one.peak + one.shards + 2 * one.layer);
      EXPECT_LE(eight.peak, two.peak + 2 * one.layer);
      EXPECT_GT(deferred.peak, one.peak + one.shards + 2 * one.layer) << "whole gradients are seen";
    });
  }
}

// Only the gradients of a few layers exist at the same time.
TEST_F(AccumulationMemory, UpdatesInBackwardDoNotHoldAllGradients) {
  for (const auto& layout : {RunLayout{}, RunLayout{.dp_shard = 2}}) {
    on_ranks(layout.dp_shard, [&](const std::shared_ptr<comm::World>& world) {
      const auto usual = memory_of_a_step(world, layout, 2, {.max_grad_norm = 0}),
                 early = memory_of_a_step(world, layout, 2, {.max_grad_norm = 0, .early_step = true});
      const auto one = memory_of_a_step(world, layout, 1, {.max_grad_norm = 0}),
                 early_one = memory_of_a_step(world, layout, 1, {.max_grad_norm = 0, .early_step = true});
      if (world->rank() == 0) {
        fmt::print("{} shards: {} bytes with one micro-batch, {} updated early; {} and {} with two; shards of {}\n",
                   layout.dp_shard, one.peak, early_one.peak, usual.peak, early.peak, one.shards);
      }
      // An accelerator's peak is then early in backward, when two all-gathers have buffers.
      const int64_t gathers = testing::on_accelerator() && world->size() > 1 ? one.layer : 0;
      EXPECT_LE(early_one.peak, one.peak - one.shards / 2 + gathers);
      // The sums over micro-batches exist before the last micro-batch. One more layer is allowed, because the peaks of
      // two ranks may or may not coincide.
      EXPECT_LE(early.peak, usual.peak + (world->size() > 1 ? usual.layer : 0));
    });
  }
}

}  // namespace
}  // namespace tessera::train
