// The error report of a rank: the error that ends the rank, in a file that its launcher reads.
//
//   } catch (const std::exception& error) {
//     if (!comm::report_error(error)) std::fputs(error.what(), stderr);   // else Tessera's launcher prints it, once
//     return exit_code_for(error);
//   }
//
// The environment variable TORCHELASTIC_ERROR_FILE names the file. Its format is torchrun's, so torchrun shows the
// message of a Tessera rank, and Tessera's launcher shows the message of a Python rank (docs/design/rendezvous.md). Not
// thread-safe.
#pragma once

#include <exception>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera::comm {

// Writes the report when TORCHELASTIC_ERROR_FILE is set. Returns true when Tessera's launcher will print the report, so
// that the rank need not print it.
bool report_error(const std::exception& error) noexcept;

struct ErrorReport {
  std::string message;
  bool consequence = false;  // the rank failed because another rank failed (PeerFailed)
};
// Reads the report in the file `path`. Returns nullopt when there is no file, or when it holds no report.
std::optional<ErrorReport> read_error_report(const std::filesystem::path& path);

}  // namespace tessera::comm
