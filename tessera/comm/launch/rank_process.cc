#include "tessera/comm/launch/rank_process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/comm/launch/launch_signals.h"

extern char** environ;

namespace tessera::comm {
namespace {

// A launcher that ends normally sends this number to the guard instead of a process group number.
constexpr pid_t kDismissed = 0;

// Returns whether a process that shows an empty environment may be in execve(), during which the kernel shows no
// environment. Returns false for kernel threads and zombies: they have no executable and never get an environment.
bool may_be_in_execve(const std::filesystem::path& process) {
  char target[1];
  return ::readlink((process / "exe").c_str(), target, sizeof target) >= 0;
}

// Kills every process whose environment contains a path in `folder`. Descendants of a rank inherit the environment, so
// this also finds those that left the rank's process group. The search is repeated after every kill, because the
// killed process may have been starting another one. It is also repeated while a process may be in execve(), for two
// seconds at most, because a process may have been given an empty environment on purpose.
void kill_descendants(const std::filesystem::path& folder) {
  constexpr int kMaxRounds = 100;
  constexpr useconds_t kPause = 20'000;  // microseconds
  const std::string mark = folder.string() + "/";
  bool found = true;
  for (int round = 0; found && round < kMaxRounds; ++round) {
    if (round > 0) ::usleep(kPause);
    found = false;
    std::error_code failed;
    for (std::filesystem::directory_iterator entry("/proc", failed), end; !failed && entry != end;
         entry.increment(failed)) {
      const pid_t pid = std::atoi(entry->path().filename().c_str());
      if (pid <= 0) continue;
      std::ifstream file(entry->path() / "environ", std::ios::binary);
      const std::string environment((std::istreambuf_iterator<char>(file)), {});
      if (environment.empty()) {
        found = may_be_in_execve(entry->path()) || found;
      } else if (environment.find(mark) != environment.npos) {
        found = ::kill(pid, SIGKILL) == 0 || found;
      }
    }
  }
}

// The guard process. It reads the ids of POSIX process groups from its socket until it reads kDismissed or the end of
// the stream. After kDismissed it exits. The end of the stream means that the launcher died, because the kernel closes
// the launcher's end of the socket however the launcher dies; the guard process then kills these process groups.
[[noreturn]] void run_guard(int line, const std::filesystem::path& folder) {
  ::setsid();  // the terminal's signals do not reach a process of another session
  ::prctl(PR_SET_NAME, "tessera-guard");
  sigset_t all;
  ::sigfillset(&all);
  ::sigprocmask(SIG_SETMASK, &all, nullptr);
  // All inherited descriptors are closed: a reader of the launcher's output or pipes would otherwise wait until the
  // guard ends.
  const int null = ::open("/dev/null", O_RDWR);
  for (int descriptor = 0; descriptor < 3; ++descriptor) ::dup2(null, descriptor);
  ::dup2(line, 3);
  line = 3;
  ::close_range(4, ~0U, 0);
  std::vector<pid_t> groups;
  for (;;) {
    pid_t group = 0;
    const ssize_t got = ::read(line, &group, sizeof group);
    if (got < 0 && errno == EINTR) continue;
    if (got == sizeof group && group == kDismissed) ::_exit(0);
    if (got != sizeof group) break;
    groups.push_back(group);
  }
  for (const pid_t group : groups) ::kill(-group, SIGKILL);
  kill_descendants(folder);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  ::_exit(0);
}

std::vector<std::string> environment_of(const RankCommand& command) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    const bool dropped = command.set.contains(name) || std::ranges::find(command.unset, name) != command.unset.end();
    if (!dropped) result.push_back(text);
  }
  for (const auto& [name, value] : command.set) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

using CoreSet = std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)>;

CoreSet core_set(const std::vector<int>& cores, size_t& bytes) {
  const int most = cores.empty() ? 0 : *std::ranges::max_element(cores);
  CoreSet set(CPU_ALLOC(most + 1), [](cpu_set_t* one) { CPU_FREE(one); });
  TESSERA_CHECK(set, ErrorKind::kMemory, "[launch] no memory for a set of {} cores", most + 1);
  bytes = CPU_ALLOC_SIZE(most + 1);
  CPU_ZERO_S(bytes, set.get());
  for (const int core : cores) CPU_SET_S(core, bytes, set.get());
  return set;
}

// Prefers memory of a NUMA node. A policy that the user has set (numactl) is kept. The constants are MPOL_DEFAULT and
// MPOL_PREFERRED of libnuma's <numaif.h>, which is not a dependency.
void prefer_memory_of(int node) {
  constexpr int kDefault = 0, kPreferred = 1;
  constexpr int kMostNodes = 1024;
  int mode = -1;
  if (node < 0 || node >= kMostNodes || ::syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) != 0) return;
  if (mode != kDefault) return;
  unsigned long nodes[kMostNodes / (8 * sizeof(unsigned long))] = {};
  constexpr int kBits = 8 * sizeof(unsigned long);
  nodes[node / kBits] = 1UL << (node % kBits);
  ::syscall(SYS_set_mempolicy, kPreferred, nodes, kMostNodes);
}

}  // namespace

OrphanGuard::OrphanGuard(const std::filesystem::path& folder) {
  int ends[2];
  TESSERA_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, ErrorKind::kIo,
                "[launch] socketpair: {}", std::strerror(errno));
  line_.reset(ends[1]);
  const UniqueFd other(ends[0]);
  pid_ = ::fork();
  if (pid_ == 0) {
    line_.reset();
    run_guard(ends[0], folder);
  }
  TESSERA_CHECK(pid_ > 0, ErrorKind::kIo, "[launch] cannot start a process: {}", std::strerror(errno));
}

OrphanGuard::~OrphanGuard() {
  watch(kDismissed);
  line_.reset();
  if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
}

bool OrphanGuard::has_ended() {
  if (pid_ > 0 && ::waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
  return pid_ < 0;
}

void OrphanGuard::watch(pid_t group) {
  // The launcher writes to the guard process through a socket and not through a pipe. If the guard was killed, a write
  // to a pipe would raise SIGPIPE in the launcher; send() with MSG_NOSIGNAL does not.
  [[maybe_unused]] const auto ignored = ::send(line_.get(), &group, sizeof group, MSG_NOSIGNAL);
}

// Everything that allocates memory is prepared before fork(); the child only makes system calls. The child sets its
// parent-death signal, then checks its parent, since the launcher may have died in between.
pid_t start_rank(const RankCommand& command) {
  const auto environment = environment_of(command);
  const auto arguments = pointers(command.arguments), variables = pointers(environment);
  const pid_t launcher = ::getpid();
  size_t core_bytes = 0;
  const auto cores = core_set(command.cores, core_bytes);
  const pid_t pid = ::fork();
  TESSERA_CHECK(pid >= 0, ErrorKind::kIo, "[launch] cannot start a process: {}", std::strerror(errno));
  if (pid > 0) {
    if (command.own_group) ::setpgid(pid, pid);  // in parent and child: done before either continues
    return pid;
  }
  if (command.own_group) ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(1);  // the launcher died before prctl()
  for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGCHLD}) ::signal(signal, SIG_DFL);
  if (!is_ignored(SIGHUP)) ::signal(SIGHUP, SIG_DFL);
  if (command.out >= 0) ::dup2(command.out, STDOUT_FILENO);
  if (command.err >= 0) ::dup2(command.err, STDERR_FILENO);
  // An error of sched_setaffinity() is ignored: the cpuset may have shrunk since the launcher read it, and the rank can
  // run without being bound to cores.
  if (!command.cores.empty()) ::sched_setaffinity(0, core_bytes, cores.get());
  prefer_memory_of(command.memory_node);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::execvpe(arguments[0], arguments.data(), variables.data());
  ::dprintf(2, "tessera: error: [launch] cannot run %s: %s\n", arguments[0], std::strerror(errno));
  ::_exit(127);
}

std::vector<pid_t> children() {
  std::ifstream file("/proc/self/task/" + std::to_string(::getpid()) + "/children");
  std::vector<pid_t> result;
  for (pid_t pid = 0; file >> pid;) result.push_back(pid);
  return result;
}

void reap_orphans(const std::vector<pid_t>& known) {
  for (const pid_t pid : children()) {
    if (std::ranges::find(known, pid) == known.end()) ::waitpid(pid, nullptr, WNOHANG);
  }
}

void kill_orphans(const std::vector<pid_t>& excluded) {
  for (int round = 0; round < 100; ++round) {  // children of a killed process become ours
    bool found = false;
    for (const pid_t pid : children()) {
      if (std::ranges::find(excluded, pid) != excluded.end()) continue;
      found = true;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    if (!found) return;
  }
}

}  // namespace tessera::comm
