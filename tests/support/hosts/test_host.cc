// The host of a test program: runs each requested test in a fork (test_host.h).
#include "tests/support/hosts/test_host.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/support/hosts/test_request.h"
#include "tests/support/stacks/stacks.h"

namespace tessera::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kIdle = std::chrono::seconds(10);  // time without requests after which a host ends

// One test, and the client that waits for the test's end.
struct RunningTest {
  int client = -1;
  pid_t process = -1;
};

int listen_at_path(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) return -1;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ::unlink(path.c_str());
  if (::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) || ::listen(listener, 64)) return -1;
  return listener;
}

// Runs in the fork, and gives it the state of a process that was started only for this test: streams, environment and
// folder.
void become(const Request& request, const std::vector<int>& streams) {
  ::setpgid(0, 0);
  for (int i = 0; i < kStreams; ++i) ::dup2(streams[static_cast<size_t>(i)], i);
  for (const int stream : streams) ::close(stream);
  ::clearenv();
  for (const auto& setting : request.environment) {
    const size_t equals = setting.find('=');
    if (equals != setting.npos) ::setenv(setting.substr(0, equals).c_str(), setting.c_str() + equals + 1, 1);
  }
  if (::chdir(request.folder.c_str())) std::perror("chdir");
  begin_test_limit();
}

void on_child(int) {}

class Host {
 public:
  explicit Host(const std::string& path) : path_(path), listener_(listen_at_path(path)) {
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    ::sigprocmask(SIG_BLOCK, &children, &mask_);
    struct sigaction action {};
    action.sa_handler = on_child;
    ::sigaction(SIGCHLD, &action, nullptr);
  }

  // Returns only in forks, with the arguments of a test.
  std::vector<std::string> serve() {
    if (listener_ < 0) ::_exit(1);
    for (auto asked = Clock::now();;) {
      std::vector<pollfd> polled = {{listener_, POLLIN, 0}};
      for (const auto& test : running_) polled.push_back({test.client, POLLRDHUP, 0});
      const timespec second{1, 0};
      const int ready = ::ppoll(polled.data(), polled.size(), &second, &mask_);  // the end of a child interrupts ppoll
      end_tests(ready > 0 ? polled : std::vector<pollfd>());
      if (!running_.empty() || (ready > 0 && polled[0].revents)) asked = Clock::now();
      if (ready > 0 && (polled[0].revents & POLLIN)) {
        if (auto words = start_test()) return *words;
      }
      if (Clock::now() - asked > kIdle) {
        ::unlink(path_.c_str());
        ::_exit(0);
      }
    }
  }

 private:
  // Starts the requested test. The result is the test's arguments in the test's fork, and empty in the host.
  std::optional<std::vector<std::string>> start_test() {
    RunningTest test{.client = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)};
    if (test.client < 0) return std::nullopt;
    std::vector<int> streams;
    const auto request = receive_request(test.client, streams);
    if (request) test.process = ::fork();
    if (request && test.process == 0) {
      ::close(listener_);
      ::close(test.client);
      for (const auto& other : running_) ::close(other.client);
      ::signal(SIGCHLD, SIG_DFL);
      ::sigprocmask(SIG_SETMASK, &mask_, nullptr);
      become(*request, streams);
      return request->words;
    }
    for (const int stream : streams) ::close(stream);
    if (test.process > 0) ::setpgid(test.process, test.process);
    if (test.process > 0 && send_bytes(test.client, std::string(1, kStarted))) {
      running_.push_back(test);
    } else {
      end(test);
    }
    return std::nullopt;
  }

  static void end(const RunningTest& test) {
    if (test.process > 0) {
      ::kill(-test.process, SIGKILL);
      ::kill(test.process, SIGKILL);
      ::waitpid(test.process, nullptr, 0);
    }
    ::close(test.client);
  }

  // Removes tests that have ended, and kills tests whose clients are gone.
  void end_tests(const std::vector<pollfd>& polled) {
    std::vector<RunningTest> left;
    for (size_t i = 0; i < running_.size(); ++i) {
      const RunningTest& test = running_[i];
      int status = 0;
      if (::waitpid(test.process, &status, WNOHANG) == test.process) {
        send_bytes(test.client, std::string(reinterpret_cast<const char*>(&status), sizeof status));
        ::close(test.client);
      } else if (i + 1 < polled.size() && polled[i + 1].revents) {
        end(test);
      } else {
        left.push_back(test);
      }
    }
    running_ = left;
  }

  const std::string path_;
  const int listener_;
  sigset_t mask_{};  // signal mask before it was a host
  std::vector<RunningTest> running_;
};

}  // namespace

std::optional<std::vector<std::string>> serve_tests() {
  const char* path = std::getenv(kServeVariable);
  if (!path) return std::nullopt;
  ::alarm(0);  // the time limit is for a test only
  return Host(path).serve();
}

}  // namespace tessera::testing
