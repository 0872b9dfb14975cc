// Memory that this process may use: the machine's, within the limits of its control groups (containers, Slurm jobs,
// systemd slices) of version 1 and 2 and of all their parents.
//
//   const MemoryRoom room = read_memory_room();
//   if (bytes > room.total_bytes()) ...        // no process in this container can have them
//
// Reads /proc and /sys. Numbers that are not found there are 0 or absent. Thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tessera {

struct MemoryRoom {
  int64_t machine_bytes = 0;
  int64_t machine_available_bytes = 0;  // free, or held by the system's file cache
  // The least limit of the control groups of this process; absent where none limits memory.
  std::optional<int64_t> limit_bytes{};
  // The least that is left below one of those limits; file cache that no process maps counts as left.
  std::optional<int64_t> limit_available_bytes{};

  int64_t total_bytes() const;      // the machine's, or the limit where that is less
  int64_t available_bytes() const;  // the part that is not in use now
};

// root: the folder in which /proc and /sys are found.
MemoryRoom read_memory_room(const std::filesystem::path& root = "/");

}  // namespace tessera
