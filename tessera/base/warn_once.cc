#include "tessera/base/warn_once.h"

#include <mutex>
#include <set>
#include <string>

namespace tessera {

bool is_first_time(std::string_view message) {
  constexpr size_t kMostKept = 1000;
  static std::mutex mutex;
  static std::set<std::string, std::less<>> told;
  const std::lock_guard lock(mutex);
  return told.size() < kMostKept && told.emplace(message).second;
}

}  // namespace tessera
