// Locks between processes that share a folder, on any file system.
//
//   const UniqueFd file = open_to_lock(path, O_CREAT);
//   if (try_lock(file) == LockState::kHeld) ...            // until `file` is closed
//
// A lock of a local file system is seen by all processes. Network file systems differ: a lock may be seen by all hosts,
// by the processes of one host, or not be supported. Thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/base/files/unique_fd.h"

namespace tessera::data {

enum class LockState {
  kHeld,
  kBusy,     // another process holds the lock
  kNoLocks,  // the file system does not support locks
};

// Opens the file for writing, because NFS gives an exclusive lock only on a file that is open for writing. If writing
// is refused (a file of another user), opens it for reading. `flags` are added to the flags of open(). On failure the
// result is not open and errno is set.
UniqueFd open_to_lock(const std::filesystem::path& path, int flags);
LockState try_lock(const UniqueFd& file);

// False if a lock may be visible to one host only, as on network and user-space file systems.
bool locks_reach_all_hosts(const std::filesystem::path& folder);
bool locks_reach_all_hosts_on(int64_t file_system);  // f_type of statfs()

}  // namespace tessera::data
