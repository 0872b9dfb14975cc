#include "tessera/base/text/count_text.h"

#include <fmt/format.h>

namespace tessera {

std::string format_count(int64_t count) {
  if (count < 10'000) return fmt::format("{}", count);
  double value = static_cast<double>(count);
  const char* unit = "";
  for (const char* next : {"k", "M", "B"}) {
    if (value < 999.5) break;
    value /= 1000;
    unit = next;
  }
  return fmt::format("{:.{}f} {}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, unit);
}

}  // namespace tessera
