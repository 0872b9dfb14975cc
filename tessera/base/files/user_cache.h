// The user's cache folder for files that can be made again: tessera in $XDG_CACHE_HOME, else in ~/.cache. Thread-safe.
#pragma once

#include <filesystem>

namespace tessera {

// Returns the absolute path of the user's cache folder, which may not exist yet. Empty when neither $XDG_CACHE_HOME nor
// $HOME is an absolute path.
std::filesystem::path user_cache();

}  // namespace tessera
