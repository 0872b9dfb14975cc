// Copies of tensors of an accelerator to the host on a stream of its own: the host starts them and goes on, what
// computes comes behind them only before it changes the tensors. Internal to checkpoint.
//
//   DeviceCopies copies;
//   { const auto beside = copies.of(tensor); copy = pool.copy(tensor); }     // for each, on the owner's thread
//   copies.launched();
//   copies.hold_current();              // the owner's thread, before it changes one of them
//   copies.wait();                      // any thread: the copies may be read
//
// Without tensors of an accelerator nothing here does anything.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/mesh/side_stream.h"

namespace tessera {

class DeviceCopies {
 public:
  // The stream, entered, behind all that this thread has launched when the first of a snapshot came. Keeps the tensor
  // until hold_current(). Nothing for a tensor of the CPU.
  [[nodiscard]] c10::OptionalStreamGuard of(const at::Tensor& tensor);
  void launched() { done_ = stream_.mark(); }
  void hold_current();
  void wait() const { done_.wait(); }

 private:
  SideStream stream_;
  StreamMark done_;
  std::vector<at::Tensor> sources_;
};

}  // namespace tessera
