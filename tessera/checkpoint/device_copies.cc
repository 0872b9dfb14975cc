#include "tessera/checkpoint/device_copies.h"

namespace tessera {

// The first tensor of a snapshot makes the copy stream wait for the work launched so far, so the copies read finished
// values. The caching allocator may reuse a tensor's memory once the tensor is freed; sources_ keeps the tensors alive
// until the stream of the thread that changes them waits for the copies.
c10::OptionalStreamGuard DeviceCopies::enter_copy_stream(const at::Tensor& tensor) {
  if (!has_streams(tensor.device())) return c10::OptionalStreamGuard();
  if (!stream_.exists()) stream_ = DeviceStream(tensor.device(), /*high_priority=*/false);
  if (sources_.empty()) stream_.wait_current_stream();
  sources_.push_back(tensor);
  return stream_.make_current();
}

void DeviceCopies::block_current_stream() {
  if (sources_.empty()) return;
  done_.block_current_stream();
  sources_.clear();
}

}  // namespace tessera
