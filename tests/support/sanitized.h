// Whether this build uses a sanitizer. A sanitizer's own memory and speed would disturb tests that measure the process.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace tessera::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// While an object exists, memory that this thread allocates is not reported as a leak. (A suppression by function does
// not work if the stack goes through code without frame pointers.)
struct LeaksAreNotOurs {
  LeaksAreNotOurs() {}  // not trivial, so an unused object gives no warning
  ~LeaksAreNotOurs() {}
  LeaksAreNotOurs(const LeaksAreNotOurs&) = delete;
  LeaksAreNotOurs& operator=(const LeaksAreNotOurs&) = delete;
#if defined(__SANITIZE_ADDRESS__)
  __lsan::ScopedDisabler scope;
#endif
};

}  // namespace tessera::testing
