// Bytes that all threads of the program hold from malloc.
//
//   const int64_t before = heap_bytes();
//   work();
//   EXPECT_LT(heap_bytes() - before, limit_bytes);
//
// Returns 0 under a sanitizer, which has its own malloc.
#pragma once

#include <malloc.h>

#include <cstdint>

namespace tessera::testing {

inline int64_t heap_bytes() {
  const auto info = ::mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

}  // namespace tessera::testing
