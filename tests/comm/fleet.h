// Ranks as forked processes that nobody supervises, as under torchrun or srun, to be killed, stopped and read.
//
//   Fleet fleet(3, {.timeout = 2s}, [](const std::shared_ptr<World>& world) { ... });
//   fleet.await_ready();                     // every body has called Fleet::ready()
//   fleet.send(1, SIGKILL);
//   EXPECT_EQ(fleet.end_of(0).code, 4);
//
// Forking is right because the parent has one thread: ctest runs every test in a process of its own.
#pragma once

#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/world.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {

inline double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A port that no other test has, and that is no outgoing connection's either: below those. A Unix socket of that name
// holds it for this process.
inline int free_port() {
  static std::minstd_rand random(std::random_device{}());
  for (;;) {
    const int port = 10'000 + static_cast<int>(random() % 20'000);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const int length = std::snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "tessera-test-port-%d", port);
    const int held = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
    const int descriptor = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool free = ::bind(held, reinterpret_cast<sockaddr*>(&name), bytes) == 0 &&
                      ::bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    ::close(descriptor);
    if (free) return port;
    ::close(held);
  }
}

class Fleet {
 public:
  using Body = std::function<void(const std::shared_ptr<World>&)>;
  struct End {
    int code = -1;  // 128 + n when signal n ended it
    double time = 0;
    std::string text;  // of stderr
  };

  // `before` runs in a rank before it connects.
  Fleet(
      int size, const RendezvousFlags& flags, const Body& body, int port = free_port(),
      const std::function<void(int rank)>& before = [](int) {})
      : ends_(static_cast<size_t>(size)) {
    int ends[2] = {-1, -1};
    TESSERA_CHECK(::pipe2(ends, O_CLOEXEC) == 0, ErrorKind::kIo, "[test] pipe");
    ready_ = ends[0];
    ready_end() = ends[1];
    std::fflush(nullptr);  // or children would write it again
    for (int rank = 0; rank < size; ++rank) {
      const pid_t pid = ::fork();
      if (pid == 0) run_rank(rank, size, port, flags, body, before);
      pids_.push_back(pid);
    }
    ::close(ends[1]);
  }
  ~Fleet() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (ends_[rank].code >= 0) continue;
      ::kill(pids_[rank], SIGKILL);
      ::waitpid(pids_[rank], nullptr, 0);
    }
    ::close(ready_);
  }
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  // In a body.
  static void ready() {
    const char byte = 0;
    TESSERA_CHECK(::write(ready_end(), &byte, 1) == 1, ErrorKind::kIo, "[test] nobody waits");
  }
  // False: a rank did not get there within 60 s.
  bool await_ready() const {
    const double limit = clock_seconds() + 60;
    for (size_t count = 0; count < pids_.size();) {
      pollfd polled{ready_, POLLIN, 0};
      char byte = 0;
      if (clock_seconds() > limit) return false;
      if (::poll(&polled, 1, 1000) <= 0) continue;
      if (::read(ready_, &byte, 1) != 1) return false;
      ++count;
    }
    return true;
  }
  void send(int rank, int signal) const { ::kill(pids_.at(static_cast<size_t>(rank)), signal); }
  // Waits for the end of a rank; after 60 s it is killed.
  const End& end_of(int rank) {
    const double limit = clock_seconds() + 60;
    while (ends_.at(static_cast<size_t>(rank)).code < 0 && clock_seconds() < limit) {
      reap();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (ends_[static_cast<size_t>(rank)].code < 0) {
      send(rank, SIGKILL);
      std::fprintf(stderr, "rank %d was still running after 60 s\n", rank);
      return end_of(rank);
    }
    return ends_[static_cast<size_t>(rank)];
  }

 private:
  static int& ready_end() {
    static int descriptor = -1;
    return descriptor;
  }

  [[noreturn]] void run_rank(int rank, int size, int port, const RendezvousFlags& flags, const Body& body,
                             const std::function<void(int)>& before) const {
    if (!std::freopen((folder_ / std::to_string(rank)).c_str(), "w", stderr)) ::_exit(99);
    for (const char* name : {"TESSERA_RENDEZVOUS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}) ::unsetenv(name);
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
    ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
    ::setenv("LOCAL_WORLD_SIZE", std::to_string(size).c_str(), 1);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
    at::set_num_threads(1);
    int code = 0;
    before(rank);
    try {
      RendezvousFlags over = flags;
      if (over.backend == "auto") over.backend = "gloo";  // shared memory has its own table of faults, shm_faults.h
      body(World::connect(over));
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      code = exit_code_for(error);
    }
    std::fflush(nullptr);
    ::_exit(code);
  }

  void reap() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      int status = 0;
      if (ends_[rank].code >= 0 || ::waitpid(pids_[rank], &status, WNOHANG) != pids_[rank]) continue;
      ends_[rank].time = clock_seconds();
      ends_[rank].text = read_file(folder_ / std::to_string(rank));
      ends_[rank].code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
  }

  const testing::TempFolder folder_;
  std::vector<pid_t> pids_;
  std::vector<End> ends_;
  int ready_ = -1;
};

}  // namespace tessera::comm
