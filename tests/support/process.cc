// Starts programs, collects their output and enforces their time limit (process.h).
#include "tests/support/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "tests/support/stacks/stacks.h"

namespace tessera::testing {
namespace {

std::string required_env(const char* name) {
  const char* value = std::getenv(name);
  if (!value) throw std::runtime_error(std::string(name) + " is not set: run the tests through ctest or './dev test'");
  return value;
}

void close_quietly(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

}  // namespace

ProcessResult run_process(const std::vector<std::string>& arguments, const ProcessOptions& options) {
  int in[2], out[2], err[2];
  if (::pipe2(in, O_CLOEXEC) || ::pipe2(out, O_CLOEXEC) || ::pipe2(err, O_CLOEXEC)) {
    throw std::runtime_error("pipe2 failed");
  }
  std::vector<char*> argv;
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    ::dup2(in[0], 0);
    ::dup2(out[1], 1);
    ::dup2(err[1], 2);
    for (const auto& [name, value] : options.environment) ::setenv(name.c_str(), value.c_str(), 1);
    ::execvp(argv[0], argv.data());
    ::dprintf(2, "cannot run %s: %s\n", argv[0], std::strerror(errno));
    ::_exit(127);
  }
  ::close(in[0]);
  ::close(out[1]);
  ::close(err[1]);
  ::signal(SIGPIPE, SIG_IGN);
  ::fcntl(in[1], F_SETFL, O_NONBLOCK);
  ProcessResult result;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options.timeout_seconds);
  std::optional<std::chrono::steady_clock::time_point> killed;
  size_t written = 0;
  int write_end = in[1], out_end = out[0], err_end = err[0];
  while (out_end >= 0 || err_end >= 0) {
    if (write_end >= 0 && written == options.input.size()) close_quietly(write_end);
    pollfd polled[3] = {{out_end, POLLIN, 0}, {err_end, POLLIN, 0}, {write_end, POLLOUT, 0}};
    ::poll(polled, 3, 100);
    char buffer[1 << 16];
    for (auto* side : {&polled[0], &polled[1]}) {
      if (side->fd < 0 || !(side->revents & (POLLIN | POLLHUP))) continue;
      const ssize_t got = ::read(side->fd, buffer, sizeof buffer);
      if (got > 0) (side == &polled[0] ? result.out : result.err).append(buffer, static_cast<size_t>(got));
      if (got == 0) close_quietly(side == &polled[0] ? out_end : err_end);
    }
    if (write_end >= 0 && (polled[2].revents & (POLLOUT | POLLERR))) {
      const ssize_t step = ::write(write_end, options.input.data() + written, options.input.size() - written);
      if (step > 0) written += static_cast<size_t>(step);
      if (step < 0 && errno != EAGAIN) close_quietly(write_end);
    }
    const auto now = std::chrono::steady_clock::now();
    if (now > deadline && !killed) {
      print_stacks(child, /*kills=*/true);
      ::kill(child, SIGKILL);
      killed = std::chrono::steady_clock::now();
    }
    if (killed && now > *killed + std::chrono::seconds(5)) break;  // a grandchild still holds the pipes
  }
  close_quietly(write_end);
  close_quietly(out_end);
  close_quietly(err_end);
  int status = 0;
  ::waitpid(child, &status, 0);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

std::string program() { return required_env("TESSERA_PROGRAM"); }
std::string pretend_program() { return std::filesystem::path(program()).replace_filename("tessera_pretend").string(); }
std::filesystem::path source_folder() { return required_env("TESSERA_SOURCE"); }

std::filesystem::path asset(const std::string& name) {
  const auto path = std::filesystem::path(required_env("TESSERA_ASSETS")) / name;
  if (!std::filesystem::exists(path)) throw std::runtime_error(path.string() + " is missing: run './dev assets'");
  return path;
}

}  // namespace tessera::testing
