// One run over two hosts: two launchers, each in a network namespace and under a host name of its own, joined by a pair
// of virtual interfaces. Needs the right to make namespaces, which CI has.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/launcher.h"
#include "tessera/comm/rendezvous.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr const char* kMaster = "10.77.0.1:29471";  // nobody else is in the namespaces
constexpr int kRanksOnHost = 2;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

fs::path notes() { return std::getenv("TESSERA_TEST_NOTES"); }

// What a rank does: "sum" sums over all ranks and over those of its host; "talk" goes on until something fails.
void run_rank(const std::string& mode) {
  const auto world = World::connect({.timeout = mode == "alone" ? seconds(3) : seconds(40)});
  Group& all = *world->group();
  at::Tensor sum = at::full({100'000}, world->rank() + 1.0F);
  all_reduce(all, sum).wait();
  const int first = world->rank() / kRanksOnHost * kRanksOnHost;
  const auto neighbours = world->new_group({first, first + 1}, "host");
  at::Tensor near = at::full({3}, world->rank() + 1.0F);
  all_reduce(*neighbours, near).wait();
  TESSERA_CHECK(all.backend().getBackendName() == "mixed", ErrorKind::kInternal, "[test] {} over two hosts",
                all.backend().getBackendName());
  publish_file(notes() / fmt::format("rank-{}", world->rank()),
               fmt::format("{} {} {} {} {}", sum[99'999].item<float>(), near[2].item<float>(),
                           neighbours->backend().getBackendName(), world->info().local_rank, world->info().local_size));
  while (mode == "talk") barrier(all);
}

TEST(DISABLED_RankOfAHost, Main) {
  int code = 0;
  try {
    run_rank(std::getenv("TESSERA_TEST_MODE"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = exit_code_for(error);
  }
  std::fflush(nullptr);
  std::_Exit(code);
}

// A process in namespaces of its own that waits for go() and then runs the ranks of one host.
class Host {
 public:
  Host(int number, const fs::path& folder, const std::string& mode)
      : number_(number), log_(folder / fmt::format("host-{}", number)) {
    int up[2], down[2];
    if (::pipe(up) != 0 || ::pipe(down) != 0) throw std::runtime_error("pipe");
    std::fflush(nullptr);
    process_ = ::fork();
    if (process_ == 0) {
      ::close(down[1]);
      run(up[1], down[0], folder, mode);
    }
    ::close(up[1]);
    ::close(down[0]);
    go_ = down[1];
    int refused = EIO;
    if (::read(up[0], &refused, sizeof refused) != sizeof refused) refused = EIO;
    ::close(up[0]);
    refused_ = refused;
  }
  ~Host() {
    ::close(go_);
    if (code_ >= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  int refused() const { return refused_; }  // errno of the namespaces
  pid_t process() const { return process_; }
  void go() const { EXPECT_EQ(::write(go_, "g", 1), 1); }
  // The launcher's exit code; 128 + n after signal n.
  int wait() {
    int status = 0;
    ::waitpid(process_, &status, 0);
    code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    return code_;
  }
  std::string said() const { return read_file(log_); }

 private:
  [[noreturn]] void run(int up, int down, const fs::path& folder, const std::string& mode) const {
    if (!std::freopen(log_.c_str(), "w", stderr)) ::_exit(99);
    const std::string name = fmt::format("host{}.invalid", number_);  // resolves nowhere
    const int refused =
        ::unshare(CLONE_NEWNET | CLONE_NEWUTS) == 0 && ::sethostname(name.c_str(), name.size()) == 0 ? 0 : errno;
    char byte;
    if (::write(up, &refused, sizeof refused) < 0 || ::read(down, &byte, 1) != 1) ::_exit(98);
    ::setenv("TESSERA_TEST_NOTES", folder.c_str(), 1);
    ::setenv("TESSERA_TEST_MODE", mode.c_str(), 1);
    for (const char* variable : {"TESSERA_RENDEZVOUS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"})
      ::unsetenv(variable);
    int code = 97;
    try {
      code = launch_local_ranks({fs::read_symlink("/proc/self/exe").string(), "--gtest_also_run_disabled_tests",
                                 "--gtest_filter=DISABLED_RankOfAHost.Main", "--gtest_brief=1"},
                                {.nproc = kRanksOnHost, .nnodes = 2, .node_rank = number_, .master = kMaster});
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
    }
    std::fflush(nullptr);
    ::_exit(code);
  }

  int number_;
  fs::path log_;
  pid_t process_ = -1;
  int go_ = -1, refused_ = 0, code_ = -1;
};

class TwoHosts : public ::testing::Test {
 protected:
  void start(const std::string& mode) {
    for (int number = 0; number < 2; ++number) hosts_.push_back(std::make_unique<Host>(number, folder_.path(), mode));
    if (hosts_[0]->refused() == EPERM) {
      GTEST_SKIP() << "NOT RUN: this user may not make network namespaces (CAP_SYS_ADMIN). Run the tests as root.";
    }
    ASSERT_EQ(hosts_[0]->refused(), 0) << std::strerror(hosts_[0]->refused());
    ASSERT_EQ(hosts_[1]->refused(), 0) << std::strerror(hosts_[1]->refused());
    const auto pid = [&](int number) { return std::to_string(hosts_[number]->process()); };
    must({"ip", "link", "add", "wire", "netns", pid(0), "type", "veth", "peer", "name", "wire", "netns", pid(1)});
    for (int number = 0; number < 2; ++number) {
      in_host(number, {"ip", "link", "set", "lo", "up"});
      in_host(number, {"ip", "address", "add", fmt::format("10.77.0.{}/24", number + 1), "dev", "wire"});
      in_host(number, {"ip", "link", "set", "wire", "up"});
    }
  }
  static void must(const std::vector<std::string>& command) {
    const auto result = testing::run_process(command);
    ASSERT_EQ(result.exit_code, 0) << command[0] << " " << command[1] << ": " << result.err;
  }
  void in_host(int number, std::vector<std::string> command) const {
    const std::string target = std::to_string(hosts_[number]->process());
    command.insert(command.begin(), {"nsenter", "--target", target, "--net", "--uts"});
    must(command);
  }
  // What rank `rank` found.
  std::string note(int rank) const {
    const fs::path path = folder_.path() / fmt::format("rank-{}", rank);
    return fs::exists(path) ? read_file(path) : "nothing";
  }

  const testing::TempFolder folder_;
  std::vector<std::unique_ptr<Host>> hosts_;
};

TEST_F(TwoHosts, AreOneRunAlsoWhenOneIsLate) {
  start("sum");
  if (IsSkipped() || HasFatalFailure()) return;
  hosts_[1]->go();
  std::this_thread::sleep_for(seconds(2));
  hosts_[0]->go();
  for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 0) << host->said();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(note(rank), fmt::format("10 {} shm {} 2", rank < 2 ? 3 : 7, rank % 2));
}

TEST_F(TwoHosts, AHostThatNeverComesIsNamed) {
  start("alone");
  if (IsSkipped() || HasFatalFailure()) return;
  hosts_[0]->go();
  EXPECT_EQ(hosts_[0]->wait(), 4);
  EXPECT_THAT(hosts_[0]->said(), HasSubstr("rank 2, 3 of 4 did not arrive within 3 s at 10.77.0.1:29471"));
}

TEST_F(TwoHosts, AHostThatIsCutOffEndsTheRunOnBothSides) {
  start("talk");
  if (IsSkipped() || HasFatalFailure()) return;
  for (const auto& host : hosts_) host->go();
  for (const double limit = now_seconds() + 40;
       now_seconds() < limit && (note(0) == "nothing" || note(3) == "nothing");) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  in_host(1, {"ip", "link", "set", "wire", "down"});
  const double cut = now_seconds();
  for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 4) << host->said();
  EXPECT_LT(now_seconds() - cut, 20);
  EXPECT_THAT(hosts_[0]->said(),
              AllOf(AnyOf(HasSubstr("rank 2 has"), HasSubstr("rank 3 has")),
                    HasSubstr("not been heard of for 4 s: it is stopped, or its host is down or unreachable")));
  EXPECT_THAT(hosts_[1]->said(), HasSubstr("rank 0 has not been heard of for 4 s"));
}

}  // namespace
}  // namespace tessera::comm
