// A snapshot that a writer's thread takes while its owner goes on: who waits for whom, and whether the owner changed
// what was still to be copied. Internal to checkpoint.
//
//   SnapshotGate gate(tensors);              // the owner's thread
//   ... gate.copied(); ... gate.wait_settled() ...      // the writer's thread: "" or what is wrong
//   gate.settle();                           // the owner's thread, before it changes anything
//
// Writes are told by PyTorch's version counters, which in-place operations, collectives and optimizers count up once
// they have written; so only the owner's own thread can say that there were none. What no counter tells (writes through
// a data pointer) is not seen.
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

  // The writer has its copies, or has given up. May be called again.
  void copied();
  // Waits for that, and says whether the tensors are still as they were given. The owner's thread; the first call
  // counts.
  void settle();
  // Waits for the owner. "" or which tensor it changed too early.
  std::string wait_settled();

 private:
  struct Seen {
    std::string name;
    at::Tensor tensor;  // the one given, and its part of this rank: a write may count at either
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
