// Locks between processes that share a folder, on whatever file system it lies.
//
//   const UniqueFd file = open_to_lock(path, O_CREAT);
//   if (try_lock(file) == LockState::kHeld) ...            // until `file` is closed
//
// Local file systems lock for all who see the folder; of others some lock for all hosts, some for each host alone, some
// for nobody. Thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>

#include "tessera/base/files/unique_fd.h"

namespace tessera::data {

enum class LockState {
  kHeld,
  kBusy,     // somebody else has it
  kNoLocks,  // this file system locks nothing
};

// For writing, as NFS gives an exclusive lock to nobody else; for reading where writing is refused (a file of another
// user). `flags` are added to those of open(). Not open, with errno, when it cannot be.
UniqueFd open_to_lock(const std::filesystem::path& path, int flags);
LockState try_lock(const UniqueFd& file);

// False where a lock may hold on one host and not on another: network and user-space file systems.
bool locks_reach_all_hosts(const std::filesystem::path& folder);
bool locks_reach_all_hosts_on(int64_t file_system);  // f_type of statfs()

}  // namespace tessera::data
