// The last words of a rank: the error that ends it, written where its launcher looks for it.
//
//   } catch (const std::exception& error) {
//     if (!comm::report_error(error)) std::fputs(error.what(), stderr);   // our launcher prints it, once
//     return exit_code_for(error);
//   }
//
// The file is the one that TORCHELASTIC_ERROR_FILE names, in torchrun's format, so that torchrun shows our
// message and our launcher that of a Python program (docs/design/rendezvous.md). Not thread-safe.
#pragma once

#include <exception>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::comm {

// Writes the report if this process is a rank that is asked for one. True: our launcher prints it, so the rank
// need not.
bool report_error(const std::exception& error) noexcept;

struct ErrorReport {
  std::string message;
  bool consequence = false;  // of another rank's failure (PeerFailed)
};
// Nothing when there is no such file or it is not a report.
std::optional<ErrorReport> read_error_report(const std::filesystem::path& path);

}  // namespace tessera::comm
