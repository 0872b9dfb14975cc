// Accelerator memory that is handed out at the same address every time, for unsharded parameters that a CUDA graph of
// their layer reads. Parameter groups that are freed after their forward and backward share two buffers in turn,
// because at most two of them are gathered at a time. A group that stays gathered has its own buffer.
//
//   FixedAddressBuffers buffers(device);
//   const size_t buffer = buffers.add_alternating(bytes);    // call for all groups before the first acquire()
//   c10::DataPtr memory = buffers.acquire(buffer);           // null while another group holds the buffer
//
// acquire() does not order streams: the caller must write to a buffer that was used before only after that use has
// ended on the stream. Belongs to one rank; the memory may outlive this object.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace tessera {

class FixedAddressBuffers {
 public:
  explicit FixedAddressBuffers(c10::Device device) : device_(device) {}
  size_t add_alternating(size_t bytes);  // one of the two shared buffers, alternating with each call
  size_t add(size_t bytes);              // a buffer of its own
  // Returns the memory of a buffer, which is allocated in the first call. Destroying the returned pointer releases the
  // buffer for the next call. Null if an earlier pointer to the buffer still exists.
  c10::DataPtr acquire(size_t buffer);

 private:
  struct Buffer;
  c10::Device device_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
  std::vector<size_t> shared_;  // positions of the two alternating buffers
  size_t turns_ = 0;
};

}  // namespace tessera
