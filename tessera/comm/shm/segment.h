// Memory that the ranks of one host share: an anonymous file (memfd), mapped by all of them.
//
//   auto memory = SharedMemory::create(bytes);                    // one rank
//   MemoryServer server;  publish(server.address());  server.hand_out(*memory, 3, deadline);
//   auto memory = SharedMemory::receive(address, bytes, deadline);   // the other processes
//
// The file never has a name, is readable by its owner only, all of it is allocated when it is made, and its size is
// sealed, so no access can fail later. The server has a Unix socket in the abstract namespace, which is no file either,
// and serves processes of the same user only. Errors: kIo, with the reason. A SharedMemory may be used by any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm::shm {

using Clock = std::chrono::steady_clock;

class SharedMemory {
 public:
  // All zero.
  static std::unique_ptr<SharedMemory> create(size_t bytes);
  // From the process behind `address`.
  static std::unique_ptr<SharedMemory> receive(const std::string& address, size_t bytes, Clock::time_point deadline);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const noexcept { return data_; }
  size_t bytes() const noexcept { return bytes_; }
  int descriptor() const noexcept { return file_.get(); }

 private:
  SharedMemory(UniqueFd file, size_t bytes);
  UniqueFd file_;
  size_t bytes_;
  std::byte* data_ = nullptr;
};

class MemoryServer {
 public:
  MemoryServer();
  const std::string& address() const noexcept { return address_; }
  // Gives `memory` to as many processes. check() is called every 100 ms and may throw.
  void hand_out(const SharedMemory& memory, int processes, Clock::time_point deadline,
                const std::function<void()>& check);

 private:
  UniqueFd socket_;
  std::string address_;
};

}  // namespace tessera::comm::shm
