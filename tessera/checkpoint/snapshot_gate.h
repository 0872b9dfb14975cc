// Synchronizes a snapshot that the writer thread copies while the owner's thread continues: the owner waits for the
// copies before it changes tensors, and the writer learns whether the owner changed a tensor too early. Internal to
// checkpoint.
//
//   SnapshotGate gate(tensors);              // the owner's thread
//   gate.copied(); ... gate.wait_settled();  // the writer thread: "" or the problem
//   gate.settle();                           // the owner's thread, before it changes a tensor
//
// Changes are detected by PyTorch's version counters. In-place operations, collectives and optimizers increase the
// counter after they have written, so only the owner's thread can know that no write is in progress. Writes through a
// data pointer have no counter and are not detected.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera {

class SnapshotGate {
 public:
  explicit SnapshotGate(const NamedTensors& tensors);

  // The writer thread has made its copies, or has failed. May be called several times.
  void copied();
  // Waits for copied(), then compares the version counters. The owner's thread calls this; only the first call has an
  // effect.
  void settle();
  // Waits for settle(). Returns "", or a message that names the tensor that was changed too early.
  std::string wait_settled();

 private:
  struct Seen {
    std::string name;
    at::Tensor tensor;  // the tensor, and below its local shard: a write may increase either counter
    at::Tensor local;
    uint64_t version;
  };
  static uint64_t version_of(const Seen& seen);

  std::vector<Seen> seen_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool copied_ = false, settled_ = false;
  std::string problem_;
};

}  // namespace tessera
