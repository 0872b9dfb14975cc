// Tests that share the start of a program (tests/support/hosts/test_host.h). Each test must still run in a process of
// its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "tests/support/hosts/test_request.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// Runs inside the hosted test: the action that `what` names.
void act(const std::string& what) {
  std::ofstream(std::getenv("HOSTED_TEST_FILE"))
      << ::getpid() << ' ' << ::getppid() << ' ' << fs::current_path().string();
  if (what == "crash") ::raise(SIGSEGV);
  if (what == "fail") {
    FAIL() << "as it should";
  }
  if (what == "sleep") std::this_thread::sleep_for(std::chrono::seconds(60));
}

struct Hosted {
  int code = -1;
  pid_t process = 0, parent = 0;
  std::string folder{}, out{};
};

class HostsOfATest {
 public:
  HostsOfATest() = default;
  ~HostsOfATest() {
    pid_t host = 0;
    if (std::ifstream(folder_ / (program_.filename().string() + ".pid")) >> host) ::kill(host, SIGKILL);
  }
  HostsOfATest(const HostsOfATest&) = delete;
  HostsOfATest& operator=(const HostsOfATest&) = delete;

  // Runs the test below with the action `what`. `hosted`: in a host, as `./dev test` does.
  Hosted run(const std::string& what, bool hosted = true, double seconds = 50) {
    const auto file = folder_ / "said";
    fs::remove(file);
    const auto result = run_process({(program_.parent_path() / "run_test").string(), program_.string(),
                                     "--gtest_filter=TestHost.RunsEachTestInASeparateProcess"},
                                    {.environment = {{"HOSTED_TEST", what},
                                                     {"HOSTED_TEST_FILE", file.string()},
                                                     {"TESSERA_TEST_HOSTS", hosted ? folder_.path().string() : ""}},
                                     .timeout_seconds = seconds});
    Hosted one{.code = result.exit_code, .out = result.out};
    std::ifstream(file) >> one.process >> one.parent >> one.folder;
    return one;
  }

 private:
  const TempFolder folder_;
  const fs::path program_ = fs::read_symlink("/proc/self/exe");
};

bool is_there(pid_t process) { return ::kill(process, 0) == 0; }

TEST(TestHost, RunsEachTestInASeparateProcess) {
  if (const char* what = std::getenv("HOSTED_TEST")) {
    act(what);
    return;
  }
  HostsOfATest hosts;
  const Hosted alone = hosts.run("pass", /*hosted=*/false), first = hosts.run("pass"), second = hosts.run("pass");
  for (const Hosted& one : {alone, first, second}) {
    EXPECT_EQ(one.code, 0) << one.out;
    EXPECT_EQ(one.folder, fs::current_path().string());
    EXPECT_THAT(one.out, HasSubstr("[  PASSED  ] 1 test."));
  }
  EXPECT_NE(first.process, second.process);
  EXPECT_EQ(first.parent, second.parent) << "the host";
  EXPECT_NE(first.parent, ::getpid());

  // A test that fails or crashes ends as it would alone, and the host continues to run.
  const Hosted failed = hosts.run("fail");
  EXPECT_EQ(failed.code, 1);
  EXPECT_THAT(failed.out, HasSubstr("as it should"));
  EXPECT_EQ(hosts.run("crash").code, 128 + SIGSEGV);
  EXPECT_EQ(hosts.run("pass").parent, first.parent);

  // If the client is killed, as ctest does at the time limit, the client's test is killed too.
  const Hosted killed = hosts.run("sleep", /*hosted=*/true, 1);
  EXPECT_EQ(killed.code, 128 + SIGKILL);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (is_there(killed.process) && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_FALSE(is_there(killed.process));
}

TEST(TestHost, RequestsArriveUnchanged) {
  const Request request{.folder = "/a b", .words = {"program", "", "--x=1"}, .environment = {"A=", "B=c\nd"}};
  const auto read = Request::parse(request.text());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->folder, request.folder);
  EXPECT_EQ(read->words, request.words);
  EXPECT_EQ(read->environment, request.environment);
  EXPECT_FALSE(Request::parse("")) << "nothing";
  EXPECT_FALSE(Request::parse(std::string("9\0/\0a\0", 6))) << "fewer words than are said to be there";
  EXPECT_FALSE(Request::parse("1")) << "no end";
}

}  // namespace
}  // namespace tessera::testing
