// What the operating system says about this machine, as `tessera doctor` reports it.
//
//   MachineFacts facts = read_machine_facts();
//
// Reads /proc and /sys; what they do not tell is left at its default. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::cli {

struct MachineFacts {
  std::string cpu_model = "unknown";
  std::vector<std::string> cpu_flags;  // those that decide about kernels: avx2, avx512f, amx_bf16, sve, ...
  int64_t cores_online = 0;
  int64_t cores_allowed = 0;          // affinity of this process
  std::optional<double> cores_quota;  // of its cgroup
  int64_t memory_bytes = 0;
  int64_t memory_available_bytes = 0;
  std::optional<int64_t> memory_limit_bytes;  // the least of its control groups and their parents
  std::string temp_folder;
  bool temp_folder_writable = false;
  int64_t temp_free_bytes = 0;
  bool memfd = false;  // anonymous shared memory
  int64_t open_files_limit = 0;
};

MachineFacts read_machine_facts();

}  // namespace tessera::cli
