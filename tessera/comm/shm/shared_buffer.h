// CPU memory that the other processes of this host can read where it lies.
//
//   c10::DataPtr memory = shared_buffers().allocate(bytes);      // as from any allocator of tensors
//   if (auto place = find_shared(data, bytes)) ...               // send *place to a peer
//   SharedView view(process, *place);  view.at(*place);          // there, while the owner keeps the memory
//
// Each buffer is a file without a name (memfd), allocated in full; peers of the same user open it under /proc. Buffers
// below 64 KiB, and those that the system refuses (a line of log says why), are ordinary memory: find_shared() does not
// know them. A forked child shares them with its parent: it gets no copy. What a peer still maps after the owner has
// freed it costs address space, no memory. Thread-safe.
#pragma once

#include <c10/core/Allocator.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace tessera::comm::shm {

// Never freed.
c10::Allocator& shared_buffers();

// Where memory lies, for other processes.
struct SharedPlace {
  uint64_t buffer = 0;  // a random number, never used again
  uint64_t offset = 0;
  int32_t descriptor = -1;  // in its owner
  uint32_t unused = 0;
};

// Nothing when the bytes are not all in one buffer of this process.
std::optional<SharedPlace> find_shared(const void* data, size_t bytes);

// Whether this process may open what `process` shares.
bool may_view(pid_t process);

// What this process has mapped of others' buffers. While they keep it, it counts in its resident size too.
size_t viewed_bytes();

// A mapping of another process's buffer, for reading. Movable.
class SharedView {
 public:
  // Error kIo when it cannot be opened or is another one by now.
  SharedView(pid_t process, const SharedPlace& place);
  ~SharedView();
  SharedView(SharedView&& other) noexcept;
  SharedView& operator=(SharedView&& other) noexcept;
  const std::byte* at(const SharedPlace& place) const noexcept { return base_ + place.offset; }
  bool is_freed() const noexcept;  // by its owner
  size_t bytes() const noexcept { return bytes_; }

 private:
  const std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tessera::comm::shm
