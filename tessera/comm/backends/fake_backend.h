// A pretended world of any size in one process, for dry runs: collectives return at once, and their cost is counted.
//
//   auto account = std::make_shared<FakeCostAccount>();
//   auto world = World::create_fake(7, 16384, account);       // rank 7; no other rank exists
//   ...                                                       // meshes, DTensors, a training step
//   account->total().microseconds
//
// Every collective behaves as if all ranks had this rank's data: an all-gather repeats the input, a sum multiplies by
// the group size. Data that only another rank could provide (a received message, the part of a scatter) is zeros.
// Tensors on the meta device are accepted, so a dry run needs no memory. Sizes, checks and errors are those of a real
// group.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>

#include "tessera/comm/group/signature.h"

namespace c10d {
class Backend;
}

namespace tessera::comm {

// Modelled cost of one collective of `bytes` in a group of `size` ranks: latency per step of a ring and bandwidth of
// the slowest link, as PyTorch's DTensor cost model has them (torch/distributed/tensor/_collective_utils.py).
struct LinkModel {
  double base_us = 6.6;
  double latency_us = 0.6, gigabytes_per_second = 87.7;  // inside a host; GB of 2^30 bytes
  double remote_latency_us = 2.7, remote_share = 0.22;   // between hosts: latency, and the share of that bandwidth
};

struct FakeCost {
  uint64_t calls = 0;
  uint64_t bytes = 0;  // bytes that this rank sends or receives, whichever is more
  double microseconds = 0;
  FakeCost& operator+=(const FakeCost& other);
};

// The counted cost of a fake world's collectives, per operation. Thread-safe.
class FakeCostAccount {
 public:
  explicit FakeCostAccount(LinkModel model = {}) : model_(model) {}
  const LinkModel& model() const { return model_; }
  void add(Op op, const FakeCost& cost);
  FakeCost of(Op op) const;
  FakeCost total() const;

 private:
  const LinkModel model_;
  mutable std::mutex mutex_;
  std::array<FakeCost, 16> costs_{};  // by Op
};

// Returns bytes and time of one call, with calls = 1. `one_host`: all ranks of the group share a host.
FakeCost modelled_cost(const LinkModel& model, const Signature& call, int rank, int size, bool one_host);

c10::intrusive_ptr<c10d::Backend> make_fake_backend(int rank, int size, bool one_host,
                                                    std::shared_ptr<FakeCostAccount> account);

}  // namespace tessera::comm
