// Makes two hosts out of network namespaces (two_hosts.h).
#include "tests/support/two_hosts.h"

#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"

namespace tessera::testing {

Host::Host(int number, const std::filesystem::path& folder, const std::string& names, const std::function<int()>& work)
    : number_(number),
      log_(folder / ("host-" + std::to_string(number))),
      names_(folder / ("names-" + std::to_string(number))) {
  int up[2], down[2];
  if (::pipe(up) != 0 || ::pipe(down) != 0) throw std::runtime_error("pipe");
  std::fflush(nullptr);
  process_ = ::fork();
  if (process_ == 0) {
    ::close(down[1]);
    run(up[1], down[0], names, work);
  }
  ::close(up[1]);
  ::close(down[0]);
  go_ = down[1];
  int refused = EIO;
  if (::read(up[0], &refused, sizeof refused) != sizeof refused) refused = EIO;
  ::close(up[0]);
  refused_ = refused;
}

Host::~Host() {
  ::close(go_);
  if (code_ >= 0) return;
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
}

void Host::go() const { EXPECT_EQ(::write(go_, "g", 1), 1); }

int Host::wait() {
  int status = 0;
  ::waitpid(process_, &status, 0);
  code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return code_;
}

std::string Host::said() const { return read_file(log_); }

int Host::enter_own_world(const std::string& names) const {
  const std::string name = "host" + std::to_string(number_) + ".invalid";  // a name that does not resolve
  publish_file(names_, names);
  const bool entered = ::unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS) == 0 &&
                       ::sethostname(name.c_str(), name.size()) == 0 &&
                       ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                       ::mount(names_.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) == 0;
  return entered ? 0 : errno;
}

void Host::run(int up, int down, const std::string& names, const std::function<int()>& work) const {
  if (!std::freopen(log_.c_str(), "w", stderr) || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) ::_exit(99);
  const int refused = enter_own_world(names);
  char byte;
  if (::write(up, &refused, sizeof refused) < 0 || ::read(down, &byte, 1) != 1) ::_exit(98);
  for (const char* variable :
       {"TESSERA_RENDEZVOUS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TESSERA_RUN_ID"})
    ::unsetenv(variable);
  int code = 97;
  try {
    code = work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::fflush(nullptr);
  ::_exit(code);
}

namespace {

void must(const std::vector<std::string>& command) {
  const auto result = run_process(command);
  ASSERT_EQ(result.exit_code, 0) << command[0] << " " << command[1] << ": " << result.err;
}

}  // namespace

void TwoHostsTest::start(const std::function<int(int number)>& work) {
  for (int number = 0; number < 2; ++number) {
    hosts_.push_back(
        std::make_unique<Host>(number, folder_.path(), names_[number], [&work, number] { return work(number); }));
  }
  if (hosts_[0]->refused() == EPERM) {
    GTEST_SKIP() << "NOT RUN: this user may not make network namespaces (CAP_SYS_ADMIN). Run the tests as root.";
  }
  for (const auto& host : hosts_) ASSERT_EQ(host->refused(), 0) << std::strerror(host->refused());
  const auto pid = [&](int number) { return std::to_string(hosts_[number]->process()); };
  must({"ip", "link", "add", "wire", "netns", pid(0), "type", "veth", "peer", "name", "wire", "netns", pid(1)});
  for (int number = 0; number < 2; ++number) {
    in_host(number, {"ip", "link", "set", "lo", "up"});
    in_host(number, {"ip", "address", "add", "10.77.0." + std::to_string(number + 1) + "/24", "dev", "wire"});
    in_host(number, {"ip", "link", "set", "wire", "up"});
  }
}

void TwoHostsTest::in_host(int number, std::vector<std::string> command) const {
  const std::string target = std::to_string(hosts_[number]->process());
  command.insert(command.begin(), {"nsenter", "--target", target, "--net", "--uts"});
  must(command);
}

}  // namespace tessera::testing
