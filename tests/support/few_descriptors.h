// While the object exists, this process can open only a given number of further files and sockets, as at its limit of
// descriptors.
//
//   {
//     const FewDescriptors none;      // the next open() fails with EMFILE
//     cache.open_or_make(...);
//   }
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace tessera::testing {

class FewDescriptors {
 public:
  explicit FewDescriptors(int more = 0) {
    const int lowest_free = ::dup(0);
    if (lowest_free < 0 || ::close(lowest_free) != 0 || ::getrlimit(RLIMIT_NOFILE, &before_) != 0) fail();
    rlimit tight = before_;
    tight.rlim_cur = static_cast<rlim_t>(lowest_free + more);
    if (::setrlimit(RLIMIT_NOFILE, &tight) != 0) fail();
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  [[noreturn]] static void fail() { throw std::system_error(errno, std::generic_category(), "RLIMIT_NOFILE"); }
  rlimit before_{};
};

}  // namespace tessera::testing
