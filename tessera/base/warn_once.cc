#include "tessera/base/warn_once.h"

#include <mutex>
#include <set>
#include <string>

namespace tessera {

bool is_first_time(std::string_view message) {
  constexpr size_t kMostKept = 1000;
  static std::mutex mutex;
  static std::set<std::string, std::less<>> logged;
  const std::lock_guard lock(mutex);
  return logged.size() < kMostKept && logged.emplace(message).second;
}

}  // namespace tessera
