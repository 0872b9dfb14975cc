// A library for LD_PRELOAD: random delays before the calls with which ranks meet, send, receive and wait, in libtorch's
// Gloo and in our code. The delays produce orders of events that do not occur on an idle machine.
//
//   LD_PRELOAD=build/tests/libdrawn_delays.so TESSERA_TEST_DELAYS="7 20 5000" build/test_comm_dist ...
//
// The three numbers are a seed, how many of 1,000 calls are delayed, and the longest delay in microseconds. The
// logarithm of a delay is uniform, from 10 us on. Each thread has its own generator, whose seed is made of the given
// seed, the process id and the thread id. Without the variable no call is delayed.
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

struct Settings {
  uint64_t seed = 0;
  unsigned of_thousand = 0;
  double longest_us = 0;

  Settings() {
    const char* text = std::getenv("TESSERA_TEST_DELAYS");
    unsigned long long number = 0;
    if (text != nullptr && std::sscanf(text, "%llu %u %lf", &number, &of_thousand, &longest_us) == 3) seed = number;
  }
};

uint64_t mixed(uint64_t word) {  // splitmix64
  word += 0x9e3779b97f4a7c15;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  return word ^ (word >> 31);
}

void delay() {
  static const Settings settings;
  if (settings.of_thousand == 0) return;
  thread_local uint64_t state = 0;
  thread_local pid_t of_process = 0;  // a fork gets a new seed
  if (of_process != ::getpid()) {
    of_process = ::getpid();
    const auto thread = static_cast<uint64_t>(::syscall(SYS_gettid));
    state = mixed(settings.seed ^ mixed(static_cast<uint64_t>(of_process) << 32 | thread));
  }
  state = mixed(state);
  if (state % 1000 >= settings.of_thousand) return;
  constexpr double kShortest = 10;
  const double part = static_cast<double>(state >> 40) / static_cast<double>(1 << 24);
  const double us = kShortest * std::pow(settings.longest_us / kShortest, part);
  const int before = errno;
  const timespec length{static_cast<time_t>(us / 1e6), static_cast<long>(std::fmod(us, 1e6) * 1e3)};
  ::clock_nanosleep(CLOCK_MONOTONIC, 0, &length, nullptr);
  errno = before;
}

}  // namespace

// Defines a libc function that delays and then calls libc's function.
#define TESSERA_DELAYED(result, name, parameters, arguments)                                    \
  extern "C" result name parameters {                                                           \
    static const auto real = reinterpret_cast<result(*) parameters>(::dlsym(RTLD_NEXT, #name)); \
    delay();                                                                                    \
    return real arguments;                                                                      \
  }

TESSERA_DELAYED(int, connect, (int socket, const sockaddr* address, socklen_t size), (socket, address, size))
TESSERA_DELAYED(int, bind, (int socket, const sockaddr* address, socklen_t size) noexcept, (socket, address, size))
TESSERA_DELAYED(int, listen, (int socket, int waiting) noexcept, (socket, waiting))
TESSERA_DELAYED(int, accept, (int socket, sockaddr* address, socklen_t* size), (socket, address, size))
TESSERA_DELAYED(int, accept4, (int socket, sockaddr* address, socklen_t* size, int flags),
                (socket, address, size, flags))
TESSERA_DELAYED(ssize_t, send, (int socket, const void* bytes, size_t size, int flags), (socket, bytes, size, flags))
TESSERA_DELAYED(ssize_t, recv, (int socket, void* bytes, size_t size, int flags), (socket, bytes, size, flags))
TESSERA_DELAYED(ssize_t, writev, (int file, const iovec* parts, int count), (file, parts, count))
TESSERA_DELAYED(int, shutdown, (int socket, int direction) noexcept, (socket, direction))
TESSERA_DELAYED(int, poll, (pollfd * polled, nfds_t count, int timeout), (polled, count, timeout))
TESSERA_DELAYED(int, epoll_wait, (int poll, epoll_event* events, int most, int timeout), (poll, events, most, timeout))
TESSERA_DELAYED(int, epoll_ctl, (int poll, int how, int file, epoll_event* event) noexcept, (poll, how, file, event))
TESSERA_DELAYED(int, close, (int file), (file))
TESSERA_DELAYED(int, pthread_cond_signal, (pthread_cond_t * condition) noexcept, (condition))
TESSERA_DELAYED(int, pthread_cond_broadcast, (pthread_cond_t * condition) noexcept, (condition))

// The shared-memory back-end sleeps and wakes through this function (futex).
extern "C" long syscall(long number, ...) noexcept {
  using Real = long (*)(long, long, long, long, long, long, long);
  static const auto real = reinterpret_cast<Real>(::dlsym(RTLD_NEXT, "syscall"));
  va_list list;
  va_start(list, number);
  long words[6];
  for (long& word : words) word = va_arg(list, long);
  va_end(list);
  if (number == SYS_futex) delay();
  return real(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
