// The memory that this process may use: the machine's memory, within the limits of its control groups (containers,
// Slurm jobs, systemd slices) of version 1 and 2 and of all their parents.
//
//   const AvailableMemory memory = read_available_memory();
//   if (bytes > memory.total_bytes()) ...        // more than any process in this container can have
//
// Reads /proc and /sys. Numbers that are missing there are 0 or nullopt. Thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace tessera {

struct AvailableMemory {
  int64_t machine_bytes = 0;
  int64_t machine_available_bytes = 0;  // free, or used by the file cache
  // The lowest limit of the control groups of this process; nullopt if no group has a limit.
  std::optional<int64_t> limit_bytes{};
  // The smallest number of bytes that any limit of the control groups of this process leaves; nullopt if no group has a
  // limit. File cache that is not shared memory and that no process maps counts as free.
  std::optional<int64_t> limit_available_bytes{};

  int64_t total_bytes() const;      // the machine's memory, or the limit if that is lower
  int64_t available_bytes() const;  // the part that is not in use now
};

// `root` is the folder that contains proc and sys.
AvailableMemory read_available_memory(const std::filesystem::path& root = "/");

}  // namespace tessera
