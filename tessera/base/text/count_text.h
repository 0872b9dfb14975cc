// Formats a count for people.
//
//   format_count(4'980'736)          // "4.98 M"
//
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

// A whole number below ten thousand, else three digits: "1536", "24.6 k", "4.98 M", "8.03 B".
std::string format_count(int64_t count);

}  // namespace tessera
