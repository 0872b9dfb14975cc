// The control plane of a large run on one machine. Every rank is a thread with real connections to the store and the
// watchdog of rank 0. Rank 0 is a process of its own, so that its memory, descriptors and CPU time can be measured.
//
//   const ControlPlane found = run_control_plane(8000, 8);
//
// run_control_plane() forks, so the calling process must have one thread.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "tessera/base/log.h"
#include "tessera/base/machine/host.h"
#include "tessera/comm/rendezvous/run_store.h"
#include "tessera/comm/watch/monitor.h"
#include "tessera/comm/watch/watchdog.h"
#include "tests/comm/fleet.h"

namespace tessera::comm {

struct ControlPlane {
  int ended_well = 0;          // number of ranks
  double meeting_seconds = 0;  // from the start until the last rank has met the others
  double watch_seconds = 0;    // from the end of the meeting until all ranks are watched
  double store_requests = 0, store_bytes = 0;
  double memory_bytes = 0;          // of rank 0's process: growth during the run
  double descriptors = 0;           // of rank 0's process
  double watch_cpu_share = 0;       // of rank 0's process while no collectives run; 1 is a whole core
  double watch_bytes_a_second = 0;  // through loopback, of all ranks, both directions
};

namespace scale {

inline double resident_bytes() {
  std::ifstream file("/proc/self/statm");
  double size = 0, resident = 0;
  file >> size >> resident;
  return resident * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

inline double cpu_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

inline double loopback_bytes() {
  std::ifstream file("/proc/self/net/dev");
  for (std::string line; std::getline(file, line);) {
    const size_t name = line.find("lo:");
    if (name != line.npos) return std::atof(line.c_str() + name + 3);
  }
  return 0;
}

inline double descriptors() {
  return static_cast<double>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}));
}

// Counters of the ranks, in memory that all processes share.
struct Tally {
  std::atomic<int> met{0}, watched{0}, well{0};
};

class Listener final : public FailureListener {
 public:
  FlightRecord recent_calls(uint32_t, uint64_t) override { return {}; }
  void on_failure_report(const FailureReport& report) override {
    std::fprintf(stderr, "verdict: %s\n", report.text.c_str());
  }
};

// Waits until `count` is `size`. The default interval is long: frequent polls by thousands of threads would change the
// measured load.
inline void await(const std::atomic<int>& count, int size, int every_ms = 1000) {
  while (count.load() < size) std::this_thread::sleep_for(std::chrono::milliseconds(every_ms));
}

inline void run_rank(int rank, int size, int local_size, int port, Tally& tally, ControlPlane* figures, double start) {
  RendezvousPoint point;
  point.info = {.rank = rank, .size = size, .local_rank = rank % local_size, .local_size = local_size};
  point.host = "127.0.0.1";
  point.port = port;
  point.serve = rank == 0;
  point.run = "scale";
  point.token = "token";
  Listener listener;
  try {
    auto store = meet(point, std::chrono::seconds(120));
    tally.met.fetch_add(1);
    if (figures) {
      await(tally.met, size, 10);
      figures->meeting_seconds = clock_seconds() - start;
    }
    c10d::PrefixStore watch("watch", store);
    const auto watchdog = start_watchdog(
        watch, {.rank = rank, .size = size, .timeout = std::chrono::seconds(120), .silence = std::chrono::seconds(60)},
        listener);
    if (!watchdog) throw std::runtime_error("no watch");
    tally.watched.fetch_add(1);
    await(tally.watched, size, figures ? 10 : 1000);
    if (figures) {
      figures->watch_seconds = clock_seconds() - start - figures->meeting_seconds;
      const double cpu = cpu_seconds(), bytes = loopback_bytes(), begin = clock_seconds();
      std::this_thread::sleep_for(std::chrono::seconds(5));
      const double seconds = clock_seconds() - begin;
      figures->watch_cpu_share = (cpu_seconds() - cpu) / seconds;
      figures->watch_bytes_a_second = (loopback_bytes() - bytes) / seconds;
      figures->descriptors = descriptors();
      auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
      const auto hub =
          prefixed ? c10::dynamic_intrusive_pointer_cast<RunStore>(prefixed->getUnderlyingStore()) : nullptr;
      if (hub && hub->server()) {
        const RunStoreStatistics statistics = hub->server()->statistics();
        figures->store_requests = static_cast<double>(statistics.requests);
        figures->store_bytes = static_cast<double>(statistics.bytes);
      }
    }
    tally.well.fetch_add(1);
    await(tally.well, size);  // all ranks need the store and the watchdog until here
    watchdog->leave(false);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    ::_exit(1);
  }
}

}  // namespace scale

inline ControlPlane run_control_plane(int size, int local_size) {
  struct Shared {
    scale::Tally tally;
    ControlPlane figures;
  };
  void* memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TESSERA_CHECK(memory != MAP_FAILED, ErrorKind::kIo, "[test] mmap");
  auto* shared = new (memory) Shared();
  const int port = free_port();
  raise_open_files_limit();
  constexpr int kRanksAProcess = 2000;
  std::vector<pid_t> processes;
  const double start = clock_seconds();
  for (int first = 0; first < size; first += first == 0 ? 1 : kRanksAProcess) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      set_log_level(LogLevel::kError);
      if (first == 0) {
        const double before = scale::resident_bytes();
        scale::run_rank(0, size, local_size, port, shared->tally, &shared->figures, start);
        shared->figures.memory_bytes = scale::resident_bytes() - before;
        std::fflush(nullptr);
        ::_exit(0);
      }
      std::vector<std::thread> ranks;
      for (int rank = first; rank < std::min(size, first + kRanksAProcess); ++rank) {
        ranks.emplace_back([=] { scale::run_rank(rank, size, local_size, port, shared->tally, nullptr, start); });
      }
      for (auto& rank : ranks) rank.join();
      ::_exit(0);
    }
    processes.push_back(pid);
  }
  bool well = true;
  for (size_t left = processes.size(); left > 0; --left) {
    int status = 0;
    const pid_t ended = ::wait(&status);
    if (status == 0 || !well) continue;
    well = false;  // the other processes would wait for the ranks of this one
    for (const pid_t pid : processes) {
      if (pid != ended) ::kill(pid, SIGKILL);
    }
  }
  ControlPlane found = shared->figures;
  found.ended_well = shared->tally.well.load();
  ::munmap(memory, sizeof(Shared));
  return found;
}

}  // namespace tessera::comm
