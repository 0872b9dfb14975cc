// Whether this build is a sanitizer's, whose own memory and pace a test that measures the process would see.
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

// While one lives, what this thread allocates is no leak. (A suppression by function is not found where the stack goes
// through code without frame pointers.)
struct LeaksAreNotOurs {
  LeaksAreNotOurs() {}  // not trivial: an unused one warns of nothing
  ~LeaksAreNotOurs() {}
  LeaksAreNotOurs(const LeaksAreNotOurs&) = delete;
  LeaksAreNotOurs& operator=(const LeaksAreNotOurs&) = delete;
#if defined(__SANITIZE_ADDRESS__)
  __lsan::ScopedDisabler scope;
#endif
};

}  // namespace tessera::testing
