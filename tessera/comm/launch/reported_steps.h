// Notes between a rank and its launcher: the rank reports finished steps, the launcher reports why it restarted the
// ranks.
//
//   comm::report_step(12);                                 // rank 0, after each step
//   if (const auto reason = comm::restart_reason()) ...    // in a rank of the second attempt
//
// report_step() writes the step as a decimal number to the file that TESSERA_PROGRESS_FILE names. Any program may write
// this file; the launcher reads it at the end of each attempt. Not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::comm {

// Reports a finished step to the launcher: one write of 20 bytes to a file in memory or the page cache. Does nothing
// without a launcher. Failures of the write are ignored, because the launcher uses the step only to decide about
// restarts and in the messages about restarts (RestartPolicy).
void report_step(int64_t step) noexcept;
// Returns the step that report_step() last wrote to `file`; nullopt when there is no file or it holds no step.
std::optional<int64_t> read_reported_step(const std::filesystem::path& file);

struct RestartReason {
  int attempt = 0;  // number of the restart, from 1
  std::string text;
};
// Why the launcher restarted this process; nullopt in the first attempt and without a launcher.
std::optional<RestartReason> restart_reason();

}  // namespace tessera::comm
