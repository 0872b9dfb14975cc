#include "tessera/base/files/user_cache.h"

#include <cstdlib>

namespace tessera {

std::filesystem::path user_cache() {
  const auto set = [](const char* name) {
    const char* value = std::getenv(name);
    return std::filesystem::path(value && *value == '/' ? value : "");  // the XDG rules ignore relative paths
  };
  if (const auto cache = set("XDG_CACHE_HOME"); !cache.empty()) return cache / "tessera";
  if (const auto home = set("HOME"); !home.empty()) return home / ".cache" / "tessera";
  return {};
}

}  // namespace tessera
