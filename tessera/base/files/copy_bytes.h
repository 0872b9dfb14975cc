// std::memcpy that also accepts 0 bytes with null pointers, which std::memcpy forbids. Thread-safe.
#pragma once

#include <cstddef>
#include <cstring>

namespace tessera {

inline void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace tessera
