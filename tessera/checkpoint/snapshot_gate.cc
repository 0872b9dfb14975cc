#include "tessera/checkpoint/snapshot_gate.h"

#include <ATen/core/grad_mode.h>

#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

SnapshotGate::SnapshotGate(const NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  tracked_.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    tracked_.push_back({name, tensor, is_dtensor(tensor) ? to_local(tensor) : tensor, 0});
    tracked_.back().version = version_of(tracked_.back());
  }
}

// Tensors made in inference mode have no version counter and count as unchanged. copy_snapshot() never defers their
// copies.
uint64_t SnapshotGate::version_of(const TrackedTensor& tracked) {
  const auto version = [](const at::Tensor& tensor) {
    return !tensor.defined() || tensor.is_inference() ? 0 : static_cast<uint64_t>(tensor._version());
  };
  return version(tracked.tensor) + version(tracked.local);
}

void SnapshotGate::mark_copied() {
  const std::lock_guard lock(mutex_);
  copied_ = true;
  changed_.notify_all();
}

// The owner's thread, which called save(), must call this function, because only this thread changes the tensors. So no
// tensor changes while the function waits for the copies and compares the version counters. A version counter that
// differs was incremented before this call, when the copy of its tensor may not have been complete.
void SnapshotGate::wait_and_check() {
  std::unique_lock lock(mutex_);
  if (checked_) return;
  changed_.wait(lock, [&] { return copied_; });
  for (const auto& tracked : tracked_) {
    if (version_of(tracked) == tracked.version) continue;
    problem_ = fmt::format(
        "{}: changed before its copy was taken. Call wait_for_snapshot() between save() and the first change, or do "
        "not set "
        "CheckpointOptions::defer_copy",
        quote(tracked.name));
    break;
  }
  tracked_.clear();
  checked_ = true;
  changed_.notify_all();
}

std::string SnapshotGate::wait_for_check() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return checked_; });
  return problem_;
}

}  // namespace tessera
