// Ranks as forked processes that may be killed, and the random kills that the fault tests share.
//
//   const auto ends = run_forked(3, 5s, [](const std::shared_ptr<World>& world) { ... });
//   EXPECT_EQ(ends[1].exit_code, 137);
//
// The ranks are forked and start no new program, so a rank runs after milliseconds. The body runs with one compute
// thread.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/world.h"
#include "tests/support/prompt.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm::testing_faults {

using SteadyClock = std::chrono::steady_clock;
using Body = std::function<void(const std::shared_ptr<World>&)>;

struct End {
  int exit_code = -1;   // 128 + n after signal n
  std::string message;  // text of the error that ended the rank
  double seconds = 0;   // from the start of all ranks until the end of this one
};

// The shared memory of ranks. The memory has no name, so see() records the memory of a running rank through the rank's
// descriptors. still_held() then looks for this memory in every process. A process that holds the memory keeps it
// allocated.
class SharedFiles {
 public:
  void see(pid_t process) {
    visit(process, [this](ino_t file) { files_.insert(file); });
  }
  size_t count() const { return files_.size(); }
  size_t still_held() const {
    std::set<ino_t> held;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != name.npos) continue;
      visit(std::stoi(name), [&](ino_t file) {
        if (files_.contains(file)) held.insert(file);
      });
    }
    return held.size();
  }

 private:
  template <class Visit>
  static void visit(pid_t process, const Visit& visit) {
    std::error_code failed, gone;
    const std::filesystem::path folder = fmt::format("/proc/{}/fd", process);
    for (std::filesystem::directory_iterator entry(folder, failed), end; !failed && entry != end;
         entry.increment(failed)) {
      if (!std::filesystem::read_symlink(entry->path(), gone).string().starts_with("/memfd:tessera") || gone) continue;
      struct stat status {};
      if (::stat(entry->path().c_str(), &status) == 0) visit(status.st_ino);
    }
  }
  std::set<ino_t> files_;
};

struct Forked {
  pid_t process;
  int pipe;
};

inline Forked fork_rank(int rank, int size, const std::string& store, std::chrono::milliseconds timeout,
                        const std::string& backend, const Body& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2");
  const pid_t process = ::fork();
  if (process != 0) {
    ::close(ends[1]);
    return {process, ends[0]};
  }
  int code = 0;
  std::string message;
  try {
    at::set_num_threads(1);
    const auto world =
        World::create({.rank = rank, .size = size, .local_rank = rank, .local_size = size, .source = "flags"},
                      c10::make_intrusive<c10d::FileStore>(store, size), {.backend = backend, .timeout = timeout});
    body(world);
  } catch (const std::exception& error) {
    code = exit_code_for(error);
    message = error.what();
  }
  if (::write(ends[1], message.data(), message.size()) < 0) code = 99;
  ::_exit(code);
}

// Runs `body` in `size` ranks. Ranks that have not ended `limit` after the start are killed. Stopped ranks are killed
// as soon as all remaining ranks are stopped.
inline std::vector<End> run_forked(int size, std::chrono::milliseconds timeout, const Body& body,
                                   const std::string& backend = "shm",
                                   std::chrono::seconds limit = std::chrono::seconds(50),
                                   SharedFiles* files = nullptr) {
  const tessera::testing::TempFolder folder;
  std::fflush(nullptr);
  const auto begin = SteadyClock::now();
  std::vector<Forked> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(fork_rank(rank, size, (folder.path() / "store").string(), timeout, backend, body));
  }
  std::vector<End> ends(size);
  int stopped = 0;
  for (int left = size; left > 0;) {
    const bool late = stopped == left || SteadyClock::now() - begin > limit;
    for (int rank = 0; rank < size; ++rank) {
      int status = 0;
      if (ends[rank].exit_code >= 0) continue;
      if (files) files->see(ranks[rank].process);
      if (late) ::kill(ranks[rank].process, SIGKILL);
      if (::waitpid(ranks[rank].process, &status, late ? 0 : WNOHANG | WUNTRACED) == 0) continue;
      if (WIFSTOPPED(status)) {
        ++stopped;
        continue;
      }
      ends[rank].exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      ends[rank].seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count();
      --left;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (int rank = 0; rank < size; ++rank) {
    char text[4096];
    const ssize_t count = ::read(ranks[rank].pipe, text, sizeof text);
    ends[rank].message.assign(text, count > 0 ? count : 0);
    ::close(ranks[rank].pipe);
  }
  return ends;
}

// Runs collectives and messages of random sizes, the same on every rank, until an error. Half of the tensors are in
// shared buffers.
inline void communicate_forever(Group& group, uint32_t seed) {
  std::mt19937 random(seed);
  const int size = group.size(), rank = group.rank();
  for (;;) {
    const int64_t count = int64_t{1} << (random() % 19);
    at::Tensor one = at::ones({count}), all = at::empty({count * size});
    if (random() % 2 == 0) {
      one = group.backend().allocateTensor(count, at::kFloat).fill_(1);
      all = group.backend().allocateTensor(count * size, at::kFloat).fill_(0);
    }
    switch (random() % 6) {
      case 0:
        all_reduce(group, one).wait();
        break;
      case 1:
        all_gather_into(group, all, one).wait();
        break;
      case 2:
        reduce_scatter_into(group, one, all).wait();
        break;
      case 3:
        broadcast(group, one, static_cast<int>(random() % size)).wait();
        break;
      case 4:
        all_to_all_single(group, at::empty_like(all), all).wait();
        break;
      default: {
        PendingCollective sent = send(group, one, (rank + 1) % size);
        PendingCollective received = recv(group, at::empty({count}), (rank + size - 1) % size);
        received.wait();
        sent.wait();
      }
    }
  }
}

// Whether `message` names `rank` as dead. The back-end that waits or the watchdog writes the message, whichever detects
// the death first.
inline bool names_as_dead(const std::string& message, int rank) {
  const std::string name = "rank " + std::to_string(rank);
  return message.find(name + " (process ") != std::string::npos ||
         message.find(name + " has ended") != std::string::npos;
}

// Kills one of three ranks at a random time. The other ranks must name the killed rank and end.
inline void kill_at_random(uint32_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  const int victim = static_cast<int>(seed % 3);
  std::mt19937 random(seed);
  const auto delay = std::chrono::microseconds(random() % 40'000);
  SharedFiles files;
  const auto ends = run_forked(
      3, std::chrono::seconds(60),
      [&](const std::shared_ptr<World>& world) {
        const auto group = world->group();
        std::thread killer;
        if (world->rank() == victim) {
          killer = std::thread([delay] {
            std::this_thread::sleep_for(delay);
            ::kill(::getpid(), SIGKILL);
          });
        }
        communicate_forever(*group, seed);
      },
      "shm", std::chrono::seconds(50), &files);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(ends[rank].exit_code, rank == victim ? 137 : 4) << ends[rank].message;
    if (rank == victim) continue;
    EXPECT_TRUE(names_as_dead(ends[rank].message, victim)) << ends[rank].message;
    EXPECT_LT(ends[rank].seconds - ends[victim].seconds, testing::kPromptSeconds);
  }
  EXPECT_EQ(files.still_held(), 0U);
}

}  // namespace tessera::comm::testing_faults
