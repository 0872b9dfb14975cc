// Synchronizes a snapshot that the writer thread copies while the owner's thread continues: the owner waits for the
// copies before it changes tensors, and the writer learns whether the owner changed a tensor too early. Internal to
// checkpoint.
//
//   SnapshotGate gate(tensors);                     // the owner's thread
//   gate.mark_copied(); ... gate.wait_for_check();  // the writer thread: "" or the problem
//   gate.wait_and_check();                          // the owner's thread, before it changes a tensor
//
// Changes are detected by PyTorch's version counters. In-place operations, collectives and optimizers increase the
// counter after they have written, so only the owner's thread can compare the counters while no write is in progress.
// Writes through a data pointer have no counter and are not detected.
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

  // The writer thread calls this when its copies are made or have failed. It may be called several times.
  void mark_copied();
  // Waits for mark_copied(), then compares the version counter of each tensor with its value at construction. If they
  // differ, the tensor was changed too early, and wait_for_check() returns a message. The owner's thread calls this
  // function; only the first call has an effect.
  void wait_and_check();
  // The writer thread calls this. Waits until the owner's thread has finished wait_and_check(). Returns "", or a
  // message that names a tensor that was changed before it was copied.
  std::string wait_for_check();

 private:
  struct TrackedTensor {
    std::string name;
    at::Tensor tensor;  // the tensor, and below its local shard: a write may increase either counter
    at::Tensor local;
    uint64_t version;
  };
  static uint64_t version_of(const TrackedTensor& tracked);

  std::vector<TrackedTensor> tracked_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool copied_ = false, checked_ = false;
  std::string problem_;
};

}  // namespace tessera
