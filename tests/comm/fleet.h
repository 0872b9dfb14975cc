// Ranks as forked processes without a launcher, as under torchrun or srun. Tests kill and stop them, and read their
// stderr.
//
//   Fleet fleet(3, {.timeout = 2s}, [](const std::shared_ptr<World>& world) { ... });
//   fleet.await_ready();                     // every body has called Fleet::ready()
//   fleet.send(1, SIGKILL);
//   EXPECT_EQ(fleet.end_of(0).code, 4);
//
// The parent may fork because it has one thread: ctest runs every test in a process of its own.
#pragma once

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/world.h"
#include "tests/support/free_port.h"
#include "tests/support/stacks/stacks.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {

inline double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

using testing::free_port;

class Fleet {
 public:
  using Body = std::function<void(const std::shared_ptr<World>&)>;
  struct End {
    int code = -1;  // 128 + n if signal n ended the rank
    double time = 0;
    std::string text;  // output on stderr
  };

  // `before` runs in each rank before the rank connects.
  Fleet(
      int size, const RendezvousFlags& flags, const Body& body, int port = free_port(),
      const std::function<void(int rank)>& before = [](int) {})
      : ends_(static_cast<size_t>(size)) {
    int ends[2] = {-1, -1};
    TESSERA_CHECK(::pipe2(ends, O_CLOEXEC) == 0, ErrorKind::kIo, "[test] pipe");
    ready_ = ends[0];
    ready_end() = ends[1];
    std::fflush(nullptr);  // otherwise the children would write the buffered output again
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

  // To be called in a body: marks this rank as ready.
  static void ready() {
    const char byte = 0;
    TESSERA_CHECK(::write(ready_end(), &byte, 1) == 1, ErrorKind::kIo, "[test] nobody waits");
  }
  // Waits until all ranks are ready. Returns false if a rank is not ready within 60 s.
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
  pid_t process(int rank) const { return pids_.at(static_cast<size_t>(rank)); }
  void send(int rank, int signal) const { ::kill(pids_.at(static_cast<size_t>(rank)), signal); }
  // Waits for the end of a rank. After 60 s the stacks of the rank are printed and it is killed.
  const End& end_of(int rank) {
    const double limit = clock_seconds() + 60;
    while (ends_.at(static_cast<size_t>(rank)).code < 0 && clock_seconds() < limit) {
      reap();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (ends_[static_cast<size_t>(rank)].code < 0) {
      std::fprintf(stderr, "rank %d was still running after 60 s\n", rank);
      testing::print_stacks(pids_[static_cast<size_t>(rank)]);
      send(rank, SIGKILL);
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
      if (over.backend == "auto") over.backend = "gloo";  // shm_faults.h has the faults of shared memory
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
      const auto said = folder_ / std::to_string(rank);
      ends_[rank].text = std::filesystem::exists(said) ? read_file(said) : "";  // dead ranks may have no file
      ends_[rank].code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
  }

  const testing::TempFolder folder_;
  std::vector<pid_t> pids_;
  std::vector<End> ends_;
  int ready_ = -1;
};

}  // namespace tessera::comm
