// Connects to a host process of tests, and starts the host if there is none.
#include "tests/support/hosts/host_client.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace tessera::testing {
namespace {

int connect_to(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return socket;
  ::close(socket);
  return -1;
}

void start_host(const std::string& name, const std::function<void()>& become) {
  const pid_t child = ::fork();
  if (child != 0) {
    ::waitpid(child, nullptr, 0);
    return;
  }
  ::setsid();
  if (::fork() != 0) ::_exit(0);
  const int log = ::open((name + ".log").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  const int nothing = ::open("/dev/null", O_RDONLY);
  ::dup2(nothing, 0);
  ::dup2(log, 1);
  ::dup2(log, 2);
  ::close_range(3, ~0U, 0);
  if (std::FILE* pid = std::fopen((name + ".pid").c_str(), "w")) {
    std::fprintf(pid, "%d\n", ::getpid());
    std::fclose(pid);
  }
  become();
  ::_exit(127);
}

}  // namespace

int reach_host(const std::string& name, const std::function<void()>& become) {
  const std::string path = name + ".socket";
  if (path.size() >= sizeof sockaddr_un{}.sun_path) return -1;
  if (const int socket = connect_to(path); socket >= 0) return socket;
  const int lock = ::open((name + ".lock").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  if (lock < 0 || ::flock(lock, LOCK_EX)) return -1;
  int socket = connect_to(path);
  if (socket < 0) start_host(name, become);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (socket < 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    socket = connect_to(path);
  }
  ::close(lock);
  return socket;
}

}  // namespace tessera::testing
