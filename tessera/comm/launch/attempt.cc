#include "tessera/comm/launch/attempt.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/files/scratch_folder.h"
#include "tessera/base/machine/endpoint.h"
#include "tessera/base/machine/listen.h"
#include "tessera/comm/errors/error_report.h"
#include "tessera/comm/launch/rank_process.h"
#include "tessera/comm/launch/reported_steps.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// When the first rank to end failed only because of another rank (PeerFailed), the launcher waits this long for the
// rank with the original error to end too.
constexpr milliseconds kCauseDelay{1000};

// Returns a port of the loopback interface that is free now, for programs that read MASTER_PORT. Tessera itself does
// not use the port.
int free_port() {
  try {
    return listen_at("127.0.0.1", 0, ListenScope::kThisHost).port;
  } catch (const Error&) {
    return 29500;
  }
}

// Number of processes that the kernel's out-of-memory killer has killed since boot; 0 where the kernel does not say.
int64_t out_of_memory_kills() {
  std::ifstream file("/proc/vmstat");
  int64_t count = 0;
  for (std::string name; file >> name >> count;) {
    if (name == "oom_kill") return count;
  }
  return 0;
}

// Cuts a text to at most 4096 bytes at a UTF-8 character boundary, so that it fits a log line and an environment
// variable (limit: 128 KiB).
std::string shortened(std::string text) {
  constexpr size_t kMost = 4096;
  if (text.size() <= kMost) return text;
  size_t end = kMost;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return text.substr(0, end) + "...";
}

struct Rank {
  int rank = 0;
  pid_t pid = -1;
  std::optional<int> status;  // status of waitpid(2), once the process has ended
  bool failed() const { return status && *status != 0; }
};

// Runs one attempt as a loop on one thread: step() waits for a signal, output or a deadline, passes signals on, and
// reaps ranks. An attempt ends in stages. A failed rank sets `end_at_` (at once, or kCauseDelay later when its error is
// only a consequence); at `end_at_` all ranks receive SIGTERM and `kill_at_` is set; at `kill_at_` they receive
// SIGKILL, again every second. Failures after `ending_` is set come from our own signals and are ignored.
class Supervisor {
 public:
  Supervisor(const LaunchPlan& plan, int attempt, const std::string& reason, SignalQueue& signals, RankOutputs& outputs)
      : plan_(plan), options_(plan.options), attempt_(attempt), reason_(reason), signals_(signals), outputs_(outputs) {
    outputs_.begin_attempt(attempt, folder_.path());
    begin_guard();
  }
  ~Supervisor() {
    signal_all(SIGKILL);  // ranks are still running when the start of a later rank failed
    for (auto& rank : ranks_) {
      if (!rank.status) ::waitpid(rank.pid, nullptr, 0);
    }
    auto excluded = before_;
    if (guard_) excluded.push_back(guard_->pid());
    kill_orphans(excluded);
  }

  AttemptResult run() {
    foreground_rank_ = ::isatty(STDIN_FILENO) == 1 && options_.node_rank == 0;  // rank 0 may read from the terminal
    ranks_.reserve(static_cast<size_t>(options_.nproc));
    for (int local = 0; local < options_.nproc; ++local) start(local, !(foreground_rank_ && local == 0));
    outputs_.close_own();
    while (std::ranges::any_of(ranks_, [](const Rank& rank) { return !rank.status; })) step();
    outputs_.finish();
    return finish();
  }

 private:
  fs::path progress_file() const { return folder_.path() / "progress"; }
  fs::path report_of(int rank) const { return folder_.path() / fmt::format("error-{}.json", rank); }

  void start(int local, bool own_group) {
    const int rank = plan_.first_rank + local;
    RankCommand command{.arguments = plan_.arguments, .set = environment_of(rank, local), .own_group = own_group};
    const auto streams = outputs_.open(rank, local);
    command.out = streams.out;
    command.err = streams.err;
    if (!plan_.cores.of_ranks.empty()) {
      const CoreShare& share = plan_.cores.of_ranks.at(static_cast<size_t>(local));
      command.cores = share.cores;
      command.memory_node = share.node;
    }
    command.unset = {"TORCHELASTIC_USE_AGENT_STORE"};
    if (!options_.token_file.empty()) command.unset.emplace_back("TESSERA_TOKEN");
    if (reason_.empty()) command.unset.emplace_back("TESSERA_RESTART_REASON");
    ranks_.push_back({.rank = rank, .pid = start_rank(command), .status = std::nullopt});
    if (own_group && guard_) guard_->watch(ranks_.back().pid);
  }

  // Returns the environment variables of a rank: torchrun's variables, and the place of the rendezvous: on one host a
  // file store in the attempt's folder (mode 0700), on several hosts --master. A user's OMP_NUM_THREADS is kept; a
  // user's TESSERA_RUN_ID is kept unless --run-id is given.
  std::map<std::string, std::string> environment_of(int rank, int local) const {
    std::map<std::string, std::string> set = {{"RANK", std::to_string(rank)},
                                              {"WORLD_SIZE", std::to_string(plan_.world_size)},
                                              {"LOCAL_RANK", std::to_string(local)},
                                              {"LOCAL_WORLD_SIZE", std::to_string(options_.nproc)},
                                              {"GROUP_RANK", std::to_string(options_.node_rank)},
                                              {"GROUP_WORLD_SIZE", std::to_string(options_.nnodes)},
                                              {"ROLE_NAME", "default"},
                                              {"ROLE_RANK", std::to_string(rank)},
                                              {"ROLE_WORLD_SIZE", std::to_string(plan_.world_size)},
                                              {"TORCHELASTIC_RESTART_COUNT", std::to_string(attempt_)},
                                              {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options_.max_restarts)},
                                              {"TORCHELASTIC_RUN_ID", plan_.id},
                                              {"TESSERA_LAUNCH_ID", plan_.id},
                                              {"TORCHELASTIC_ERROR_FILE", report_of(rank).string()},
                                              {"TESSERA_PROGRESS_FILE", progress_file().string()}};
    if (!reason_.empty()) set["TESSERA_RESTART_REASON"] = reason_;
    if (!options_.token_file.empty()) set["TESSERA_TOKEN_FILE"] = fs::absolute(options_.token_file).string();
    if (options_.nnodes == 1) {
      set["MASTER_ADDR"] = "127.0.0.1";
      set["MASTER_PORT"] = std::to_string(port_);
      set["TESSERA_RENDEZVOUS"] = "file:" + folder_.path().string();
    } else {
      const auto [host, port] = parse_endpoint(options_.master, "--master");
      set["MASTER_ADDR"] = host;
      set["MASTER_PORT"] = std::to_string(port);
      set["TESSERA_RENDEZVOUS"] = "tcp:" + options_.master;
      const char* run_id = std::getenv("TESSERA_RUN_ID");
      if (!options_.run_id.empty() || !run_id || !*run_id) set["TESSERA_RUN_ID"] = plan_.id;
    }
    const char* threads = std::getenv("OMP_NUM_THREADS");
    if (!threads || !*threads) set["OMP_NUM_THREADS"] = std::to_string(plan_.cores.threads);
    return set;
  }

  // Starts a guard process (OrphanGuard) for the ranks that still run. restart_guard_and_reap() calls this function
  // again when the guard process was killed.
  void begin_guard() {
    guard_.emplace(folder_.path());
    for (const auto& rank : ranks_) {
      if (!rank.status && has_group(rank)) guard_->watch(rank.pid);
    }
  }

  // Starts a new guard process (OrphanGuard) if the last one was killed. Also reaps ended processes that a rank had
  // started and that became children of this process when the rank ended.
  void restart_guard_and_reap() {
    if (guard_ && guard_->has_ended()) {
      guard_.reset();
      try {
        begin_guard();
      } catch (const Error& error) {  // the ranks still have their parent-death signal
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
    wait = std::min(wait, outputs_.poll_interval().value_or(wait));
    signals_.wait(std::max(wait, milliseconds(0)), outputs_.descriptor());
    outputs_.show_new_output();
    while (const auto info = signals_.next()) {
      if (info->ssi_signo != SIGCHLD) forward_signal(*info);
    }
    for (auto& rank : ranks_) {
      if (!rank.status && reap(rank)) record_rank_end(rank);
    }
    restart_guard_and_reap();
    if (end_at_ && Clock::now() >= *end_at_) terminate_ranks(options_.grace);
    if (kill_at_ && Clock::now() >= *kill_at_) {
      if (!ending_) std::fputs("tessera: error: [launch] some ranks did not stop in time and were killed\n", stderr);
      ending_ = true;
      signal_all(SIGKILL);  // also ends processes stopped by SIGSTOP
      kill_at_ = Clock::now() + std::chrono::seconds(1);
    }
  }

  // Reaps a rank that has ended, and kills the processes it started. waitid(WNOWAIT) first leaves the rank a zombie, so
  // that the kernel cannot give its process group number to another process before the group is killed.
  bool reap(Rank& rank) {
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) {
      return false;
    }
    if (has_group(rank)) ::kill(-rank.pid, SIGKILL);
    int status = 0;
    ::waitpid(rank.pid, &status, 0);
    rank.status = status;
    return true;
  }

  // Passes a signal on to the ranks. The first SIGINT, SIGTERM or SIGHUP lets the ranks save and end by themselves; the
  // second one starts the SIGTERM / SIGKILL sequence. After SIGUSR1 there is no restart if `stops_on_usr1` is set (the
  // started program ends on this signal), or if a rank has failed already.
  void forward_signal(const signalfd_siginfo& info) {
    const int signal = static_cast<int>(info.ssi_signo);
    const bool ends = signal == SIGINT || signal == SIGTERM || signal == SIGHUP;
    if (ends && asked_to_stop_) return terminate_ranks(options_.grace);  // the second request
    if (ends) asked_to_stop_ = signal;
    if (signal == SIGUSR1) {
      usr1_rules_out_restart_ = usr1_rules_out_restart_ || options_.stops_on_usr1 || first_ || ending_;
    }
    for (const auto& rank : ranks_) {
      if (rank.status) continue;
      if (!has_group(rank) && info.ssi_code == SI_KERNEL) continue;  // the terminal has sent it already
      ::kill(has_group(rank) ? -rank.pid : rank.pid, signal);
    }
  }

  // Chooses the failure to report: that of the first failed rank whose error is not a consequence of another rank's
  // failure, otherwise that of the first failed rank. An error that is no consequence ends the attempt at once, a
  // consequence kCauseDelay later.
  void record_rank_end(const Rank& rank) {
    if (!rank.failed()) {
      if (asked_to_stop_ && !kill_at_) kill_at_ = Clock::now() + options_.stop_grace;
      return;
    }
    if (ending_) return;  // the launcher's own signal ended this rank
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

  void terminate_ranks(milliseconds grace) {
    end_at_.reset();
    if (ending_) return;
    ending_ = true;
    signal_all(SIGTERM);
    kill_at_ = Clock::now() + grace;
  }

  AttemptResult finish() {
    AttemptResult end{.asked_to_stop = asked_to_stop_ != 0 || usr1_rules_out_restart_,
                      .step = read_reported_step(progress_file())};
    if (!first_) {
      for (const auto& rank : ranks_) {
        if (rank.failed() && end.exit_code == 0) end.exit_code = exit_code(rank);  // ended by a second request
      }
      return end;
    }
    end.exit_code = exit_code(*first_);
    end.failure = failure_of(*first_);
    end.consequence = consequence_;
    const int status = *first_->status;
    end.died_of_forwarded_signal = asked_to_stop_ && WIFSIGNALED(status) && WTERMSIG(status) == asked_to_stop_;
    end.last_stderr_lines = outputs_.last_stderr_lines(first_->rank);
    end.stderr_path = outputs_.stderr_path(first_->rank);
    return end;
  }

  static int exit_code(const Rank& rank) {
    return WIFSIGNALED(*rank.status) ? 128 + WTERMSIG(*rank.status) : WEXITSTATUS(*rank.status);
  }

  // Describes the end of a failed rank: its error report if there is one, else its signal or exit code. A SIGKILL is
  // reported as lack of memory when the kernel's out-of-memory killer has killed a process since the attempt began.
  RankFailure failure_of(const Rank& rank) const {
    const int status = *rank.status;
    RankFailure failure{.exit_code = exit_code(rank)};
    if (WIFSIGNALED(status)) {
      const int signal = WTERMSIG(status);
      const bool starved = signal == SIGKILL && out_of_memory_kills() > kills_before_;
      failure.cause = fmt::format("ended by signal {} ({})", signal, ::strsignal(signal));
      if (starved) {
        failure.cause += ": this machine ran out of memory and killed a process. Use more ranks or smaller batches";
      } else if (signal == SIGKILL) {
        failure.cause +=
            ". If nobody killed it, the machine ran out of memory (see 'dmesg'): use more ranks or smaller "
            "batches";
      }
      failure.from_outside =
          !starved && (signal == SIGKILL || signal == SIGTERM || signal == SIGINT || signal == SIGHUP);
    } else {
      failure.cause = report_ ? report_->message : fmt::format("ended with exit code {}", WEXITSTATUS(status));
    }
    failure.cause = shortened(first_line(failure.cause));
    failure.text = fmt::format("rank {} of {}: {}", rank.rank, plan_.world_size, failure.cause);
    return failure;
  }

  const LaunchPlan& plan_;
  const LauncherOptions& options_;
  const int attempt_;
  const std::string& reason_;
  const std::vector<pid_t> before_ = children();  // children that the caller had before the attempt
  SignalQueue& signals_;
  RankOutputs& outputs_;
  const int64_t kills_before_ = out_of_memory_kills();
  const ScratchFolder folder_{"launch"};  // mode 0700
  std::optional<OrphanGuard> guard_;
  const int port_ = free_port();
  bool foreground_rank_ = false;  // the first rank stays in the terminal's foreground process group, which is ours
  std::vector<Rank> ranks_;
  const Rank* first_ = nullptr;          // the failed rank to report
  std::optional<ErrorReport> report_;    // error report of `first_`
  bool consequence_ = false;             // `first_` failed because of a rank that has not ended yet
  int asked_to_stop_ = 0;                // number of the signal, 0: none
  bool usr1_rules_out_restart_ = false;  // SIGUSR1 was received: there is no restart
  bool ending_ = false;                  // the ranks have received SIGTERM or SIGKILL from us
  std::optional<Clock::time_point> end_at_, kill_at_;
};

}  // namespace

AttemptResult run_attempt(const LaunchPlan& plan, int attempt, const std::string& restart_reason, SignalQueue& signals,
                          RankOutputs& outputs) {
  return Supervisor(plan, attempt, restart_reason, signals, outputs).run();
}

}  // namespace tessera::comm
