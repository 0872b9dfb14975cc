// What a rank and its launcher tell one another: the step that is done, and why the ranks were started again.
//
//   comm::tell_step(12);                                   // rank 0, after each step
//   if (const auto reason = comm::restart_reason()) ...    // in a rank of the second attempt
//
// The step goes to the file that TESSERA_PROGRESS_FILE names, as a decimal number, which any program may write; its
// launcher looks at it when a rank has failed. Not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::comm {

// Costs one write of 20 bytes into a file in memory or the page cache; nothing without a launcher. Failures are silent:
// what is told is a hint.
void tell_step(int64_t step) noexcept;
// What tell_step() last wrote there; nothing when it has not, or something else is there.
std::optional<int64_t> told_step(const std::filesystem::path& file);

struct RestartReason {
  int attempt = 0;  // of the ranks, from 1 for the first restart
  std::string text;
};
// Of this process; nothing in the first attempt.
std::optional<RestartReason> restart_reason();

}  // namespace tessera::comm
