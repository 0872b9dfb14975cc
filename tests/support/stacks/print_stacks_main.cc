// print_stacks PROCESS [kill]: prints the stacks of all threads of a process and of its descendants to standard error.
// With `kill` the descendants are killed afterwards.
//
// This is a separate program, because a test that forks ranks must have no further thread. Only processes with the
// handler of stack_writer.cc have stacks to print; for other processes the kernel's information is printed.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/stacks/stack_signal.h"
#include "tests/support/stacks/symbols.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

constexpr auto kPatience = std::chrono::seconds(5);  // time limit for the threads of a process

std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

fs::path folder_of(int process) { return fs::path("/proc") / std::to_string(process); }

// The value of a line of /proc/PROCESS/status.
std::string status_of(int process, const std::string& name) {
  std::ifstream lines(folder_of(process) / "status");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name + ":")) return line.substr(std::min(line.size(), name.size() + 2));
  }
  return "";
}

std::vector<int> numbers_in(const fs::path& folder) {
  std::vector<int> numbers;
  std::error_code failed;
  for (fs::directory_iterator entry(folder, failed), end; !failed && entry != end; entry.increment(failed)) {
    const int number = std::atoi(entry->path().filename().c_str());
    if (number > 0) numbers.push_back(number);
  }
  std::ranges::sort(numbers);
  return numbers;
}

// The process and its descendants, each after its parent.
std::vector<int> with_descendants(int process) {
  std::multimap<int, int> children;
  for (const int each : numbers_in("/proc")) children.emplace(std::atoi(status_of(each, "PPid").c_str()), each);
  std::vector<int> found = {process};
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [begin, end] = children.equal_range(found[i]);
    for (auto child = begin; child != end; ++child) {
      if (child->second != ::getpid()) found.push_back(child->second);
    }
  }
  return found;
}

bool answers(int process) {
  const uint64_t caught = std::strtoull(status_of(process, "SigCgt").c_str(), nullptr, 16);
  return (caught >> (stack_signal() - 1)) & 1;
}

bool is_stopped(int process) { return status_of(process, "State").starts_with("T"); }

void remove_answer(int thread) {
  char path[64];
  stack_path(path, sizeof path, ::getpid(), thread);
  ::unlink(path);
}

// The frames of a thread, innermost first, without those of the handler. Empty until all frames are written.
std::vector<uint64_t> take_frames(int thread) {
  char path[64];
  stack_path(path, sizeof path, ::getpid(), thread);
  const std::string text = read_text(path);
  if (!text.ends_with(kLastLine)) return {};
  remove_answer(thread);
  std::vector<uint64_t> frames;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line) && line != "end";) {
    frames.push_back(std::strtoull(line.c_str(), nullptr, 16));
  }
  constexpr size_t kOfTheHandler = 2;  // the handler, and the frame to which the kernel returns
  frames.erase(frames.begin(), frames.begin() + static_cast<long>(std::min(frames.size(), kOfTheHandler)));
  return frames;
}

std::map<int, std::vector<uint64_t>> frames_of_threads(int process) {
  std::map<int, std::vector<uint64_t>> frames;
  const auto threads = numbers_in(folder_of(process) / "task");
  for (const int thread : threads) ::syscall(SYS_tgkill, process, thread, stack_signal());
  const auto limit = std::chrono::steady_clock::now() + kPatience;
  while (frames.size() < threads.size() && std::chrono::steady_clock::now() < limit) {
    for (const int thread : threads) {
      if (frames.contains(thread)) continue;
      if (auto found = take_frames(thread); !found.empty()) frames[thread] = std::move(found);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  for (const int thread : threads) {
    if (!frames.contains(thread)) remove_answer(thread);
  }
  return frames;
}

void print_stacks(int process) {
  std::string name = read_text(folder_of(process) / "cmdline");
  std::replace(name.begin(), name.end(), '\0', ' ');
  std::fprintf(stderr, "== process %d, %s: %.300s\n", process, status_of(process, "State").c_str(), name.c_str());
  const ProcessMap map(process);  // read first, because the signal may interrupt a call and so end the process
  std::map<int, std::vector<uint64_t>> frames;
  if (is_stopped(process) || !answers(process)) {
    std::fprintf(stderr, "   no stacks: %s\n", is_stopped(process) ? "it is stopped" : "it does not answer");
  } else {
    frames = frames_of_threads(process);
  }
  // Threads of a pool have equal stacks, so each stack is printed once.
  std::map<std::vector<uint64_t>, std::vector<int>> alike;
  for (const int thread : numbers_in(folder_of(process) / "task")) alike[frames[thread]].push_back(thread);
  for (const auto& [addresses, threads] : alike) {
    for (const int thread : threads) {
      const auto folder = folder_of(process) / "task" / std::to_string(thread);
      std::string comm = read_text(folder / "comm");
      comm.erase(std::remove(comm.begin(), comm.end(), '\n'), comm.end());
      std::fprintf(stderr, "-- thread %d (%s), in the kernel at %s%s\n", thread, comm.c_str(),
                   read_text(folder / "wchan").c_str(), addresses.empty() ? ": no stack" : "");
    }
    for (size_t i = 0; i < addresses.size(); ++i) {
      const uint64_t address = addresses[i] - (i > 0 ? 1 : 0);  // the return address is behind the call
      std::fprintf(stderr, "   #%zu %s\n", i, map.describe(address).c_str());
    }
  }
}

}  // namespace
}  // namespace tessera::testing

int main(int count, char** arguments) {
  using namespace tessera::testing;
  const int process = count < 2 ? 0 : std::atoi(arguments[1]);
  if (process <= 1) {
    std::fprintf(stderr, "print_stacks PROCESS [kill]: wanted the number of a process that a test has started\n");
    return 2;
  }
  const auto processes = with_descendants(process);
  for (const int each : processes) print_stacks(each);
  const bool kills = count > 2 && std::strcmp(arguments[2], "kill") == 0;
  for (const int each : processes) {
    if (kills && each != process) ::kill(each, SIGKILL);
  }
}
