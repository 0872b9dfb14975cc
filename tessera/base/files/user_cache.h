// Where this program keeps what it can make again: tessera in $XDG_CACHE_HOME, else in ~/.cache. Thread-safe.
#pragma once

#include <filesystem>

namespace tessera {

// Absolute, made by whoever writes into it; empty where neither variable names a folder.
std::filesystem::path user_cache();

}  // namespace tessera
