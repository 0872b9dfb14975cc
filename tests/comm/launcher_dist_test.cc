// The launcher with ranks that end, fail, crash or leave processes behind. Launcher and ranks are this program, started
// with a role in its environment.
#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/machine/listen.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/errors/error_report.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tests/support/process.h"
#include "tests/support/prompt.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ProcessResult;
using testing::run_process;
using testing::TempFolder;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

using testing::kPromptSeconds;

fs::path notes() { return std::getenv("TESSERA_TEST_NOTES"); }

void note(const std::string& name, const std::string& text) { publish_file(notes() / name, text); }

// The state letter of a process; '\0' if the process does not exist.
char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  return name_end == text.npos ? '\0' : text.at(name_end + 2);
}

bool eventually(double seconds, const std::function<bool()>& condition) {
  for (const double end = now_seconds() + seconds; now_seconds() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return condition();
}

// The addresses of this process's listening sockets: "127.0.0.1", "::1", or the address in hexadecimal.
std::vector<std::string> listening_addresses() {
  std::set<std::string> own;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:[")) own.insert(target.substr(8, target.size() - 9));
  }
  std::vector<std::string> found;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
      fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >> inode;
      if (state != "0A" || !own.contains(inode)) continue;
      const std::string address = local.substr(0, local.find(':'));
      found.push_back(address == "0100007F"                           ? "127.0.0.1"
                      : address == "00000000000000000000000001000000" ? "::1"
                                                                      : address);
    }
  }
  return found;
}

// The guard process of the launcher, which outlives the launcher; -1 if there is none.
pid_t guard_of_launcher() {
  const std::string launcher = std::to_string(::getppid());
  std::ifstream file("/proc/" + launcher + "/task/" + launcher + "/children");
  for (pid_t child = 0; file >> child;) {
    std::ifstream name_of("/proc/" + std::to_string(child) + "/comm");
    std::string name;
    std::getline(name_of, name);
    if (name == "tessera-guard" && state_of(child) != 'Z') return child;
  }
  return -1;
}

void kill_guard() {
  const pid_t guard = guard_of_launcher();
  TESSERA_CHECK(guard > 0 && ::kill(guard, SIGKILL) == 0, ErrorKind::kInternal, "[test] no guard");
  TESSERA_CHECK(eventually(30, [&] { return guard_of_launcher() > 0 && guard_of_launcher() != guard; }),
                ErrorKind::kInternal, "[test] no guard in its place");
}

// Makes a process in a session of its own whose parent ends, and which then ends itself. The launcher must reap it.
void leave_an_orphan_to_reap() {
  int line[2];
  TESSERA_CHECK(::pipe(line) == 0, ErrorKind::kInternal, "[test] pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    const pid_t orphan = ::fork();
    if (orphan == 0) {
      ::setsid();
      while (::getppid() == child) ::usleep(1000);
      ::usleep(50'000);
      ::_exit(0);
    }
    ::_exit(::write(line[1], &orphan, sizeof orphan) == sizeof orphan ? 0 : 1);
  }
  ::waitpid(child, nullptr, 0);
  pid_t orphan = 0;
  TESSERA_CHECK(::read(line[0], &orphan, sizeof orphan) == sizeof orphan, ErrorKind::kInternal, "[test] no orphan");
  TESSERA_CHECK(eventually(30, [&] { return state_of(orphan) == '\0'; }), ErrorKind::kInternal,
                "[test] orphan {} is {}", orphan, state_of(orphan));
}

void run_rank(const std::string& mode) {
  const auto world =
      World::connect({.backend = mode == "listen-gloo" ? "gloo" : "auto", .timeout = std::chrono::seconds(60)});
  const int rank = world->rank();
  at::Tensor sum = at::ones({4});
  all_reduce(*world->group(), sum).wait();
  note(fmt::format("pid-{}", rank), std::to_string(::getpid()));
  const ListeningSocket own = listen_at("127.0.0.1", 0, ListenScope::kThisHost);  // listening_addresses() must find it
  if (mode.starts_with("listen")) {
    note(fmt::format("listen-{}", rank), fmt::format("{}", fmt::join(listening_addresses(), "\n")));
  }
  if (mode == "ok" || mode.starts_with("listen")) {
    note(fmt::format("sum-{}", rank), std::to_string(sum[0].item<float>()));
    return;
  }
  if (mode.starts_with("guard") || mode == "orphan") {
    barrier(*world->group());
    if (rank == 1 && mode == "orphan") leave_an_orphan_to_reap();
    if (rank == 1 && mode != "orphan") kill_guard();
    barrier(*world->group());
    if (mode != "guard_and_launcher") return;
  }
  if (mode == "fail") {
    barrier(*world->group());
    TESSERA_CHECK(rank != 1, ErrorKind::kFormat, "[test] rank 1 gives up");
    all_reduce(*world->group(), sum).wait();
  }
  const pid_t grandchild = ::fork();
  if (grandchild == 0) {
    ::setsid();  // leaves even its process group
    ::execlp("sleep", "sleep", "1000", nullptr);
    ::_exit(127);
  }
  note(fmt::format("pid-grandchild-{}", rank), std::to_string(grandchild));
  if (mode == "term") ::signal(SIGTERM, [](int) { ::_exit(0); });
  barrier(*world->group());
  if (rank == 1) note("time", std::to_string(now_seconds()));
  if (rank == 1 && mode == "throw") {
    PendingCollective in_flight = all_reduce(*world->group(), sum);
    raise(ErrorKind::kFormat, "[test] rank {} gives up", rank);
  }
  if (rank == 1 && mode == "kill") ::raise(SIGKILL);
  if (rank == 1 && mode == "interrupt") ::kill(::getppid(), SIGINT);
  if (rank == 1 && mode == "term") ::kill(::getppid(), SIGTERM);
  if (rank == 1 && (mode == "kill_launcher" || mode == "guard_and_launcher")) ::kill(::getppid(), SIGKILL);
  if (rank == 1 && mode == "stop") ::raise(SIGSTOP);
  if (rank == 0 && mode == "stop") {
    const pid_t peer = std::stoi(read_file(notes() / "pid-1"));
    TESSERA_CHECK(eventually(20, [&] { return state_of(peer) == 'T'; }), ErrorKind::kInternal,
                  "[test] rank 1 is not stopped");
    note("time", std::to_string(now_seconds()));
    raise(ErrorKind::kConfig, "[test] rank 0 gives up");
  }
  if (mode == "interrupt" || mode == "term") ::sleep(60);
  all_reduce(*world->group(), sum).wait();
  barrier(*world->group());
}

// Not a test. This program runs this code when it is started as launcher or rank.
TEST(DISABLED_Role, Main) {
  const std::string role = std::getenv("TESSERA_TEST_ROLE"), mode = std::getenv("TESSERA_TEST_MODE");
  try {
    if (role == "launcher") {
      ::setenv("TESSERA_TEST_ROLE", "rank", 1);
      std::_Exit(launch_local_ranks({fs::read_symlink("/proc/self/exe").string(), "--gtest_also_run_disabled_tests",
                                     "--gtest_filter=DISABLED_Role.Main", "--gtest_brief=1"},
                                    {.nproc = 3}));
    }
    run_rank(mode);
    std::_Exit(0);
  } catch (const std::exception& error) {
    if (!report_error(error)) std::fprintf(stderr, "unreported: %s\n", error.what());
    std::_Exit(exit_code_for(error));
  }
}

struct Launched {
  TempFolder folder;
  ProcessResult result;
  double ended = 0;

  explicit Launched(const std::string& mode) {
    fs::create_directory(folder / "notes");
    fs::create_directory(folder / "tmp");
    result = run_process({fs::read_symlink("/proc/self/exe").string(), "--gtest_also_run_disabled_tests",
                          "--gtest_filter=DISABLED_Role.Main", "--gtest_brief=1"},
                         {.input = "",
                          .environment = {{"TESSERA_TEST_ROLE", "launcher"},
                                          {"TESSERA_TEST_MODE", mode},
                                          {"TESSERA_TEST_NOTES", (folder / "notes").string()},
                                          {"TMPDIR", (folder / "tmp").string()}}});
    ended = now_seconds();
  }
  std::string read(const std::string& name) const { return read_file(folder / "notes" / name); }
  double seconds_to_end() const { return ended - std::stod(read("time")); }
  bool all_gone() const {
    int count = 0;
    for (const auto& entry : fs::directory_iterator(folder / "notes")) {
      if (!entry.path().filename().string().starts_with("pid-")) continue;
      ++count;
      const char state = state_of(std::stoi(read_file(entry.path())));
      if (state != '\0' && state != 'Z') return false;  // a zombie only waits for its parent to reap it
    }
    EXPECT_GE(count, 3);
    return fs::is_empty(folder / "tmp");
  }
};

TEST(Launcher, RanksRendezvousAndExitCleanly) {
  const Launched run("ok");
  EXPECT_EQ(run.result.exit_code, 0) << run.result.err;
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(std::stof(run.read(fmt::format("sum-{}", rank))), 3.0F);
  EXPECT_THAT(run.result.err, HasSubstr("3 ranks, 3 on this host, from flags"));
  EXPECT_TRUE(run.all_gone());
}

TEST(Launcher, RanksListenOnLoopbackOnly) {
  for (const std::string mode : {"listen-gloo", "listen-auto"}) {
    SCOPED_TRACE(mode);
    const Launched run(mode);
    EXPECT_EQ(run.result.exit_code, 0) << run.result.err;
    for (int rank = 0; rank < 3; ++rank) {
      std::istringstream addresses(run.read(fmt::format("listen-{}", rank)));
      int count = 0;
      for (std::string address; std::getline(addresses, address); ++count) {
        EXPECT_TRUE(address == "127.0.0.1" || address == "::1") << "rank " << rank << " listens on " << address;
      }
      EXPECT_GE(count, mode == "listen-gloo" ? 2 : 1) << "the rank itself listens, and Gloo: the tables were misread";
    }
  }
}

TEST(Launcher, AThrowingRankEndsTheOthersAndItsMessageIsPrintedOnce) {
  const Launched run("throw");
  EXPECT_EQ(run.result.exit_code, 3);
  const std::string message = "tessera: error: rank 1 of 3: [test] rank 1 gives up\n";
  EXPECT_THAT(run.result.err, ::testing::EndsWith(message));
  EXPECT_EQ(run.result.err.find("error:"), run.result.err.rfind("error:")) << run.result.err;
  EXPECT_LT(run.seconds_to_end(), kPromptSeconds);
  EXPECT_TRUE(run.all_gone());
}

TEST(Launcher, KilledRankGivesExitCode137AndAMemoryHint) {
  const Launched run("kill");
  EXPECT_EQ(run.result.exit_code, 137);
  EXPECT_THAT(run.result.err, HasSubstr("rank 1 of 3: ended by signal 9 (Killed)"));
  EXPECT_THAT(run.result.err, HasSubstr("memory"));
  EXPECT_LT(run.seconds_to_end(), kPromptSeconds);
  EXPECT_TRUE(run.all_gone());
}

TEST(Launcher, AStoppedRankIsKilledWithTheOthers) {
  const Launched run("stop");
  EXPECT_EQ(run.result.exit_code, 2);
  EXPECT_THAT(run.result.err, HasSubstr("tessera: error: rank 0 of 3: [test] rank 0 gives up\n"));
  EXPECT_LT(run.seconds_to_end(), kPromptSeconds);
  EXPECT_TRUE(run.all_gone());
}

TEST(Launcher, InterruptIsForwardedToTheRanks) {
  const Launched run("interrupt");
  EXPECT_EQ(run.result.exit_code, 130);
  EXPECT_EQ(run.result.err.find("tessera: error"), std::string::npos) << run.result.err;
  EXPECT_LT(run.seconds_to_end(), kPromptSeconds);
  EXPECT_TRUE(run.all_gone());
}

TEST(Launcher, CleanExitOfRanksOnSigtermIsSuccess) {
  const Launched run("term");
  EXPECT_EQ(run.result.exit_code, 0) << run.result.err;
  EXPECT_LT(run.seconds_to_end(), kPromptSeconds);
  EXPECT_TRUE(run.all_gone());
}

TEST(Launcher, KilledLauncherLeavesNoProcessesOrFiles) {
  const Launched run("kill_launcher");
  EXPECT_EQ(run.result.exit_code, 137);
  EXPECT_TRUE(eventually(30, [&] { return run.all_gone(); }));
}

TEST(Launcher, KilledGuardProcessIsReplacedAndTheRunSucceeds) {
  const Launched run("guard");
  EXPECT_EQ(run.result.exit_code, 0) << run.result.err;
  EXPECT_TRUE(run.all_gone());
}

TEST(Launcher, ReplacedGuardProcessCleansUpAfterAKilledLauncher) {
  const Launched run("guard_and_launcher");
  EXPECT_EQ(run.result.exit_code, 137);
  EXPECT_TRUE(eventually(30, [&] { return run.all_gone(); }));
}

TEST(Launcher, LauncherReapsOrphansDuringTheRun) {
  const Launched run("orphan");
  EXPECT_EQ(run.result.exit_code, 0) << run.result.err;
}

TEST(Torchrun, RanksRendezvousAndTheRootCauseIsShown) {
  const TempFolder folder;
  for (const char* mode : {"ok", "fail"}) {
    const auto run =
        run_process({std::getenv("TESSERA_PYTHON"), "-m", "torch.distributed.run", "--no-python", "--standalone",
                     "--nproc-per-node", "2", fs::read_symlink("/proc/self/exe").string(),
                     "--gtest_also_run_disabled_tests", "--gtest_filter=DISABLED_Role.Main", "--gtest_brief=1"},
                    {.input = "",
                     .environment = {{"TESSERA_TEST_ROLE", "rank"},
                                     {"TESSERA_TEST_MODE", mode},
                                     {"TESSERA_TEST_NOTES", folder.path().string()}}});
    EXPECT_THAT(run.err, HasSubstr("2 ranks, 2 on this host, from torchrun, met at "));
    EXPECT_EQ(run.exit_code == 0, std::string(mode) == "ok") << run.err;
    if (run.exit_code == 0) continue;
    const size_t cause = run.err.find("Root Cause");
    ASSERT_NE(cause, std::string::npos) << run.err;
    EXPECT_THAT(run.err.substr(cause), HasSubstr("[test] rank 1 gives up"));
  }
  EXPECT_EQ(std::stof(read_file(folder / "sum-1")), 2.0F);
}

TEST(Launcher, ReturnsTheExitCodeAndSetsTorchrunVariables) {
  EXPECT_EQ(launch_local_ranks({"sh", "-c", "exit $((RANK * 7))"}, {.nproc = 2}), 7);
  EXPECT_EQ(launch_local_ranks({"sh", "-c",
                                "test $WORLD_SIZE = 4 && test $LOCAL_WORLD_SIZE = 2 && test $GROUP_RANK = 1 && "
                                "test $RANK = $((2 + LOCAL_RANK)) && test $MASTER_ADDR = h && test $MASTER_PORT = 9"},
                               {.nproc = 2, .nnodes = 2, .node_rank = 1, .master = "h:9"}),
            0);
}

TEST(Launcher, HostsMayHaveDifferentNumbersOfRanks) {
  EXPECT_EQ(launch_local_ranks(
                {"sh", "-c", "test $WORLD_SIZE = 6 && test $LOCAL_WORLD_SIZE = 2 && test $RANK = $((4 + LOCAL_RANK))"},
                {.nproc_of_hosts = {4, 2}, .nnodes = 2, .node_rank = 1, .master = "h:9"}),
            0);
}

TEST(Launcher, RunOfSeveralHostsHasARunId) {
  ::unsetenv("TESSERA_RUN_ID");
  const LauncherOptions hosts = {.nproc = 1, .nnodes = 2, .node_rank = 1, .master = "h:9"};
  LauncherOptions named = hosts;
  named.run_id = "nightly";
  EXPECT_EQ(launch_local_ranks({"sh", "-c", "test $TESSERA_RUN_ID = nightly"}, named), 0);
  // The default run id has the name of the program, but none of its arguments, which may be secret.
  const std::string script = "case $TESSERA_RUN_ID in *secret*) exit 1;; 'sh ('*) exit 0;; *) exit 1;; esac";
  EXPECT_EQ(launch_local_ranks({"sh", "-c", script, "secret"}, hosts), 0);
}

TEST(Launcher, CoreCountRespectsTheAffinityMask) {
  ::unsetenv("OMP_NUM_THREADS");
  cpu_set_t before, one;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  CPU_ZERO(&one);
  for (int core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(launch_local_ranks({"sh", "-c", "test $OMP_NUM_THREADS = 1"}, {.nproc = 1}), 0);
  ::sched_setaffinity(0, sizeof before, &before);
}

TEST(Launcher, RefusesInvalidOptions) {
  const auto refused = [](const std::vector<std::string>& arguments, const LauncherOptions& options) {
    try {
      launch_local_ranks(arguments, options);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kConfig;
    }
    return false;
  };
  EXPECT_TRUE(refused({}, {}));
  EXPECT_TRUE(refused({"no-such-program-at-all"}, {}));
  EXPECT_TRUE(refused({"/etc/passwd"}, {}));
  EXPECT_TRUE(refused({"true"}, {.nproc = 0}));
  EXPECT_TRUE(refused({"true"}, {.nproc_of_hosts = {2, 0}, .nnodes = 2, .master = "h:1"}));
  EXPECT_TRUE(refused({"true"}, {.nproc_of_hosts = {2, 1}, .nnodes = 3, .master = "h:1"}));
  EXPECT_TRUE(refused({"true"}, {.nproc = 2, .nnodes = 2}));
  EXPECT_TRUE(refused({"true"}, {.nproc = 2, .nnodes = 2, .node_rank = 2, .master = "h:1"}));
  EXPECT_TRUE(refused({"true"}, {.nproc = 2, .nnodes = 2, .node_rank = 0, .master = "h"}));
}

TEST(ErrorReport, ParsesReportsAndIgnoresInvalidFiles) {
  const TempFolder folder;
  const auto text = [&](const std::string& content) {
    publish_file(folder / "e.json", content);
    return read_error_report(folder / "e.json");
  };
  EXPECT_EQ(text(R"({"message": "plain"})")->message, "plain");
  EXPECT_TRUE(text(R"({"message": {"message": "m", "extraInfo": {"consequence": true}}})")->consequence);
  EXPECT_FALSE(text(R"({"message": {"message": "m", "extraInfo": {"py_callstack": "x"}}})")->consequence);
  for (const char* rubbish :
       {"", "[]", "{}", "{\"message\": 3}", "{\"message\": {\"message\": []}}", "{\"message\": \"x\""}) {
    EXPECT_FALSE(text(rubbish)) << rubbish;
  }
  EXPECT_FALSE(read_error_report(folder / "none.json"));
}

}  // namespace
}  // namespace tessera::comm
