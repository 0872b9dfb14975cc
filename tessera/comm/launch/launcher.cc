#include "tessera/comm/launch/launcher.h"

#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <string_view>

#include "tessera/base/endpoint.h"
#include "tessera/base/error.h"
#include "tessera/base/host.h"
#include "tessera/base/scratch_folder.h"
#include "tessera/comm/errors/error_report.h"
#include "tessera/comm/launch/rank_process.h"
#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// How long the rank at fault may take to end after one that only felt it.
constexpr milliseconds kCauseDelay{1000};

// Signals arrive through a descriptor while it lives.
class Signals {
 public:
  Signals() {
    ::sigemptyset(&set_);
    for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2}) ::sigaddset(&set_, signal);
    ::pthread_sigmask(SIG_BLOCK, &set_, &before_);
    descriptor_.reset(::signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
    TESSERA_CHECK(descriptor_.open(), ErrorKind::kIo, "[launch] signalfd: {}", std::strerror(errno));
  }
  ~Signals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  void wait(milliseconds at_most) {
    pollfd polled{descriptor_.get(), POLLIN, 0};
    ::poll(&polled, 1, static_cast<int>(at_most.count()));
  }
  std::optional<signalfd_siginfo> next() {
    signalfd_siginfo info;
    if (::read(descriptor_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
    return info;
  }

 private:
  sigset_t set_, before_;
  UniqueFd descriptor_;
};

// Orphans of our ranks become our children.
class Subreaper {
 public:
  Subreaper() {
    ::prctl(PR_GET_CHILD_SUBREAPER, &before_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~Subreaper() { ::prctl(PR_SET_CHILD_SUBREAPER, before_); }

 private:
  int before_ = 0;
};

// A port of the loopback interface that is free now, for programs that want MASTER_PORT; we do not use it.
int free_port() {
  const UniqueFd descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool bound = descriptor.open() && ::bind(descriptor.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     ::getsockname(descriptor.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0;
  return bound ? ntohs(address.sin_port) : 29500;
}

void check_program(const std::string& name) {
  std::vector<std::string> candidates = {name};
  if (name.find('/') == name.npos) {
    candidates.clear();
    const char* path = std::getenv("PATH");
    std::string_view rest = path ? path : "/bin:/usr/bin";
    while (!rest.empty()) {
      const size_t end = std::min(rest.find(':'), rest.size());
      candidates.push_back(std::string(rest.substr(0, end)) + "/" + name);
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }
  for (const auto& candidate : candidates) {
    std::error_code ignored;
    if (fs::is_regular_file(candidate, ignored) && ::access(candidate.c_str(), X_OK) == 0) return;
  }
  raise(ErrorKind::kConfig, "[launch] {}: no such program, or it may not be run", name);
}

// What is run, in one line: hosts that run something else at the same port are another run.
std::string name_of(const std::vector<std::string>& arguments) {
  constexpr size_t kShown = 160;
  std::string name = fs::path(arguments[0]).filename().string();
  for (size_t i = 1; i < arguments.size(); ++i) name += " " + arguments[i];
  std::replace(name.begin(), name.end(), '\n', ' ');
  if (name.size() <= kShown) return name;
  return fmt::format("{}... ({:016x})", name.substr(0, kShown), std::hash<std::string>()(name));
}

// The number of the first rank of this host, and how many there are in all.
struct Share {
  int first = 0, size = 0;
};

Share share_of(const LauncherOptions& options) {
  if (options.nproc_of_hosts.empty()) return {options.node_rank * options.nproc, options.nnodes * options.nproc};
  const auto begin = options.nproc_of_hosts.begin();
  return {std::accumulate(begin, begin + options.node_rank, 0),
          std::accumulate(begin, options.nproc_of_hosts.end(), 0)};
}

struct Rank {
  int rank = 0;
  pid_t pid = -1;
  std::optional<int> status;  // of waitpid, once it has ended
  bool failed() const { return status && *status != 0; }
};

class Supervisor {
 public:
  Supervisor(const std::vector<std::string>& arguments, const LauncherOptions& options)
      : arguments_(arguments), options_(options), share_(share_of(options)) {
    begin_guard();
  }
  ~Supervisor() {
    signal_all(SIGKILL);  // if starting one of them failed
    for (auto& rank : ranks_) {
      if (!rank.status) ::waitpid(rank.pid, nullptr, 0);
    }
    auto spared = before_;
    if (guard_) spared.push_back(guard_->pid());
    kill_orphans(spared);
  }

  int run() {
    foreground_rank_ = ::isatty(STDIN_FILENO) == 1 && options_.node_rank == 0;  // rank 0 may read from the terminal
    ranks_.reserve(static_cast<size_t>(options_.nproc));
    for (int local = 0; local < options_.nproc; ++local) {
      start(local, !(foreground_rank_ && local == 0));
    }
    while (std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return !rank.status; })) step();
    return finish();
  }

 private:
  fs::path report_of(int rank) const { return folder_.path() / fmt::format("error-{}.json", rank); }

  void start(int local, bool own_group) {
    const int rank = share_.first + local;
    RankCommand command{.arguments = arguments_, .set = {}, .unset = {}, .own_group = own_group};
    auto& set = command.set;
    set = {{"RANK", std::to_string(rank)},
           {"WORLD_SIZE", std::to_string(share_.size)},
           {"LOCAL_RANK", std::to_string(local)},
           {"LOCAL_WORLD_SIZE", std::to_string(options_.nproc)},
           {"GROUP_RANK", std::to_string(options_.node_rank)},
           {"GROUP_WORLD_SIZE", std::to_string(options_.nnodes)},
           {"TORCHELASTIC_ERROR_FILE", report_of(rank).string()}};
    if (options_.nnodes == 1) {
      set["MASTER_ADDR"] = "127.0.0.1";
      set["MASTER_PORT"] = std::to_string(port_);
      set["TESSERA_RENDEZVOUS"] = "file:" + folder_.path().string();
    } else {
      const auto [host, port] = parse_endpoint(options_.master, "--master");
      set["MASTER_ADDR"] = host;
      set["MASTER_PORT"] = std::to_string(port);
      set["TESSERA_RENDEZVOUS"] = "tcp:" + options_.master;
      const char* given = std::getenv("TESSERA_RUN_ID");
      if (!options_.run_id.empty() || !given || !*given) {
        set["TESSERA_RUN_ID"] = options_.run_id.empty() ? name_of(arguments_) : options_.run_id;
      }
    }
    const char* threads = std::getenv("OMP_NUM_THREADS");
    if (!threads || !*threads) {
      set["OMP_NUM_THREADS"] = std::to_string(std::max(1, usable_cores() / options_.nproc));
    }
    command.unset = {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"};
    ranks_.push_back({.rank = rank, .pid = start_rank(command), .status = std::nullopt});
    if (own_group && guard_) guard_->watch(ranks_.back().pid);
  }

  // Also in the place of one that somebody has killed.
  void begin_guard() {
    guard_.emplace(folder_.path());
    for (const auto& rank : ranks_) {
      if (!rank.status && has_group(rank)) guard_->watch(rank.pid);
    }
  }

  void look_after_the_rest() {
    if (guard_ && guard_->has_ended()) {
      guard_.reset();
      try {
        begin_guard();
      } catch (const Error& error) {  // the ranks have their own death signal
        std::fprintf(stderr, "tessera: warning: %s\n", error.what());
      }
    }
    std::vector<pid_t> known = before_;
    if (guard_) known.push_back(guard_->pid());
    for (const auto& rank : ranks_) known.push_back(rank.pid);
    reap_orphans(known);
  }

  bool has_group(const Rank& rank) const { return !(foreground_rank_ && &rank == &ranks_.front()); }

  void signal_all(int signal) {
    for (const auto& rank : ranks_) {
      if (!rank.status) ::kill(has_group(rank) ? -rank.pid : rank.pid, signal);
    }
  }

  void step() {
    milliseconds wait{60000};
    for (const auto& deadline : {kill_at_, end_at_}) {
      if (!deadline) continue;
      wait = std::min(wait, std::chrono::ceil<milliseconds>(*deadline - Clock::now()));
    }
    signals_.wait(std::max(wait, milliseconds(0)));
    while (const auto info = signals_.next()) {
      if (info->ssi_signo != SIGCHLD) pass_on(*info);
    }
    for (auto& rank : ranks_) {
      if (!rank.status && reap(rank)) note_end(rank);
    }
    look_after_the_rest();
    if (end_at_ && Clock::now() >= *end_at_) begin_end(options_.grace);
    if (kill_at_ && Clock::now() >= *kill_at_) {
      if (!ending_) std::fputs("tessera: error: [launch] some ranks did not stop in time and were killed\n", stderr);
      ending_ = true;
      signal_all(SIGKILL);  // also ends what is stopped
      kill_at_ = Clock::now() + std::chrono::seconds(1);
    }
  }

  // What a rank has started ends with it, while its group's number still cannot belong to anyone else.
  bool reap(Rank& rank) {
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0)
      return false;
    if (has_group(rank)) ::kill(-rank.pid, SIGKILL);
    int status = 0;
    ::waitpid(rank.pid, &status, 0);
    rank.status = status;
    return true;
  }

  void pass_on(const signalfd_siginfo& info) {
    const int signal = static_cast<int>(info.ssi_signo);
    const bool ends = signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
    if (ends && asked_to_stop_) return begin_end(options_.grace);  // asked twice
    if (ends) asked_to_stop_ = signal;
    for (const auto& rank : ranks_) {
      if (rank.status) continue;
      if (!has_group(rank) && info.ssi_code == SI_KERNEL) continue;  // the terminal has told it already
      ::kill(has_group(rank) ? -rank.pid : rank.pid, signal);
    }
  }

  void note_end(const Rank& rank) {
    if (!rank.failed()) {
      if (asked_to_stop_ && !kill_at_) kill_at_ = Clock::now() + options_.stop_grace;
      return;
    }
    if (ending_) return;  // by our own signal
    const auto report = read_error_report(report_of(rank.rank));
    const bool consequence = report && report->consequence;
    if (!first_ || (consequence_ && !consequence)) {
      first_ = &rank;
      report_ = report;
      consequence_ = consequence;
    }
    if (!consequence) {
      end_at_ = Clock::now();
    } else if (!end_at_) {
      end_at_ = Clock::now() + kCauseDelay;
    }
  }

  void begin_end(milliseconds grace) {
    end_at_.reset();
    if (ending_) return;
    ending_ = true;
    signal_all(SIGTERM);
    kill_at_ = Clock::now() + grace;
  }

  int finish() {
    if (!first_) {
      for (const auto& rank : ranks_) {
        if (rank.failed()) return exit_code(rank);  // ended by us, because we were asked twice
      }
      return 0;
    }
    print_first();
    return exit_code(*first_);
  }

  static int exit_code(const Rank& rank) {
    return WIFSIGNALED(*rank.status) ? 128 + WTERMSIG(*rank.status) : WEXITSTATUS(*rank.status);
  }

  void print_first() const {
    const int status = *first_->status;
    if (asked_to_stop_ && WIFSIGNALED(status) && WTERMSIG(status) == asked_to_stop_) return;  // as it was told
    std::string what;
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      what = fmt::format("ended by signal {} ({})", signal, ::strsignal(signal));
      if (signal == SIGKILL) {
        what += ". If nobody killed it, the machine ran out of memory (see 'dmesg'): use more ranks or smaller batches";
      }
    } else {
      what = report_ ? report_->message : fmt::format("ended with exit code {}", WEXITSTATUS(status));
    }
    what = what.substr(0, what.find('\n'));
    const std::string line = fmt::format("tessera: error: rank {} of {}: {}\n", first_->rank, share_.size, what);
    std::fputs(line.c_str(), stderr);
  }

  const std::vector<std::string>& arguments_;
  const LauncherOptions& options_;
  const Share share_;
  const std::vector<pid_t> before_ = children();  // which the caller had already
  const Subreaper subreaper_;
  Signals signals_;
  const ScratchFolder folder_{"launch"};
  std::optional<Guard> guard_;
  const int port_ = free_port();
  bool foreground_rank_ = false;  // the first rank shares our process group, which the terminal listens to
  std::vector<Rank> ranks_;
  const Rank* first_ = nullptr;  // to end badly
  std::optional<ErrorReport> report_;
  bool consequence_ = false;  // first_ fell with another one that has not ended yet
  int asked_to_stop_ = 0;     // the signal
  bool ending_ = false;
  std::optional<Clock::time_point> end_at_, kill_at_;
};

}  // namespace

int launch_local_ranks(const std::vector<std::string>& arguments, const LauncherOptions& given) {
  LauncherOptions options = given;
  TESSERA_CHECK(!arguments.empty(), ErrorKind::kConfig,
                "[launch] no program given. Usage: tessera launch --nproc N -- PROG ...");
  const auto check_nproc = [](int nproc) {
    TESSERA_CHECK(nproc >= 1 && nproc <= 4096, ErrorKind::kConfig, "[launch] --nproc {}: wanted 1 to 4096", nproc);
  };
  TESSERA_CHECK(options.nnodes >= 1 && options.nnodes <= 65536, ErrorKind::kConfig,
                "[launch] --nnodes {}: wanted 1 to 65536", options.nnodes);
  TESSERA_CHECK(options.node_rank >= 0 && options.node_rank < options.nnodes, ErrorKind::kConfig,
                "[launch] --node-rank {}: wanted 0 to {}, for --nnodes {}", options.node_rank, options.nnodes - 1,
                options.nnodes);
  if (options.nproc_of_hosts.empty()) {
    check_nproc(options.nproc);
  } else {
    TESSERA_CHECK(options.nproc_of_hosts.size() == static_cast<size_t>(options.nnodes), ErrorKind::kConfig,
                  "[launch] --nproc for {} hosts, --nnodes {}: wanted a number for each host",
                  options.nproc_of_hosts.size(), options.nnodes);
    for (const int nproc : options.nproc_of_hosts) check_nproc(nproc);
    options.nproc = options.nproc_of_hosts[options.node_rank];
  }
  TESSERA_CHECK(options.nnodes == 1 || !options.master.empty(), ErrorKind::kConfig,
                "[launch] --nnodes {} needs --master HOST:PORT, an address of node 0", options.nnodes);
  if (!options.master.empty()) parse_endpoint(options.master, "--master");
  check_program(arguments[0]);
  std::fflush(nullptr);  // or children would write it again
  return Supervisor(arguments, options).run();
}

}  // namespace tessera::comm
