// Shared buffers: CPU memory that other processes of this host can read in place.
//
//   c10::DataPtr memory = shared_buffers().allocate(bytes);      // as from any allocator of tensors
//   if (auto place = find_shared(data, bytes)) ...               // send *place to a peer
//   SharedView view(process, *place);  view.at(*place);          // in the peer, while the owner keeps the memory
//
// Each buffer is a file without a name (memfd), allocated in full; peers of the same user open it under /proc. Buffers
// below 64 KiB, and buffers that the system refuses (the reason is logged once), are ordinary memory, which
// find_shared() does not find. A forked child shares the buffers with its parent: there is no copy-on-write. A freed
// buffer that a peer still maps costs address space but no memory. Thread-safe.
#pragma once

#include <c10/core/Allocator.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace tessera::comm::shm {

// The allocator of shared buffers. It is never destroyed.
c10::Allocator& shared_buffers();

// The place of memory in a shared buffer, in a form that other processes can use.
struct SharedBufferPlace {
  uint64_t buffer = 0;      // a random number, never used again
  uint64_t offset = 0;      // bytes from the start of the file
  int32_t descriptor = -1;  // file descriptor in the owner's process
  uint32_t unused = 0;
};

// Returns the place of the bytes; nullopt unless all of them are in one shared buffer of this process.
std::optional<SharedBufferPlace> find_shared(const void* data, size_t bytes);

// Whether this process may open the shared buffers of `process`.
bool can_open_buffers(pid_t process);

// Number of bytes of other processes' buffers that this process has mapped. They count in its resident size (VmRSS)
// while their owners keep them.
size_t viewed_bytes();

// A mapping of another process's buffer, for reading. Movable.
class SharedView {
 public:
  // Maps the shared buffer of the process `process` that contains `place`. Error kIo when the buffer cannot be opened,
  // or when place.descriptor belongs to another file by now.
  SharedView(pid_t process, const SharedBufferPlace& place);
  ~SharedView();
  SharedView(SharedView&& other) noexcept;
  SharedView& operator=(SharedView&& other) noexcept;
  const std::byte* at(const SharedBufferPlace& place) const noexcept { return base_ + place.offset; }
  bool is_freed() const noexcept;  // whether the owner has freed the buffer
  size_t bytes() const noexcept { return bytes_; }

 private:
  const std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace tessera::comm::shm
