// Copies tensors of an accelerator to the host on a separate stream. The host continues after launching the copies; the
// computing stream waits for them only before it changes the tensors. Internal to checkpoint.
//
//   DeviceCopies copies;
//   { const auto entered = copies.enter_copy_stream(tensor); copy = pool.copy(tensor); }  // for each tensor
//   copies.record_launched();
//   copies.block_current_stream();      // the owner's thread, before it changes one of the tensors
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
  // stream waits for all work that this thread has launched. Keeps `tensor` alive until block_current_stream(). Does
  // nothing for a CPU tensor.
  [[nodiscard]] c10::OptionalStreamGuard enter_copy_stream(const at::Tensor& tensor);
  void record_launched() { done_ = stream_.record_event(); }
  void block_current_stream();
  void wait() const { done_.wait(); }

 private:
  DeviceStream stream_;
  DeviceEvent done_;
  std::vector<at::Tensor> sources_;
};

}  // namespace tessera
