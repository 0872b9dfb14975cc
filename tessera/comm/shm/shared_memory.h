// Memory that the ranks of one host share: an anonymous file (memfd) that all of them map.
//
//   auto memory = SharedMemory::create(bytes);                    // one rank
//   MemoryServer server;  publish(server.address());  server.hand_out(*memory, 3, deadline);
//   auto memory = SharedMemory::receive(address, bytes, deadline);   // the other processes
//
// The file has no name and only its owner may read it. It is allocated in full when it is made, and its size is sealed,
// so no later access can fail. The server has a Unix socket in the abstract namespace, which is no file either, and
// serves only processes of the same user. Error kIo with the reason. Any thread may use a SharedMemory.
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
  // Makes new memory, filled with zeros.
  static std::unique_ptr<SharedMemory> create(size_t bytes);
  // Receives the memory from the MemoryServer at `address`.
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
  // Sends `memory` to `processes` processes that connect. check() is called about every 100 ms and may throw.
  void hand_out(const SharedMemory& memory, int processes, Clock::time_point deadline,
                const std::function<void()>& check);

 private:
  UniqueFd socket_;
  std::string address_;
};

}  // namespace tessera::comm::shm
