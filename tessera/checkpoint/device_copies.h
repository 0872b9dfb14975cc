// Copies tensors of an accelerator to the host on a separate stream. The host continues after launching the copies; the
// computing stream waits for them only before it changes the tensors. Internal to checkpoint.
//
//   DeviceCopies copies;
//   { const auto entered = copies.of(tensor); copy = pool.copy(tensor); }    // for each, on the owner's thread
//   copies.launched();
//   copies.hold_current();              // the owner's thread, before it changes one of them
//   copies.wait();                      // any thread: the copies may be read
//
// For CPU tensors all functions do nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/mesh/device_stream.h"

namespace tessera {

class DeviceCopies {
 public:
  // Makes the copy stream current until the returned guard is destroyed. At the first tensor of a snapshot, the copy
  // stream waits for all work that this thread has launched. Keeps `tensor` alive until hold_current(). Does nothing
  // for a CPU tensor.
  [[nodiscard]] c10::OptionalStreamGuard of(const at::Tensor& tensor);
  void launched() { done_ = stream_.record_event(); }
  void hold_current();
  void wait() const { done_.wait(); }

 private:
  DeviceStream stream_;
  DeviceEvent done_;
  std::vector<at::Tensor> sources_;
};

}  // namespace tessera
