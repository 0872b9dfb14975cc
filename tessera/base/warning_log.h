// Collects the warnings of this process, for a report about the run afterwards.
//
//   WarningLog warnings;                       // collects from now on
//   ...
//   for (const auto& text : warnings.take_warnings())   // without "[tessera] rank 0: warning: "
//
// Thread-safe. Keeps at most 1,000 warnings until take_warnings(); later warnings are dropped.
#pragma once

#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

class WarningLog {
 public:
  WarningLog();
  ~WarningLog();
  WarningLog(const WarningLog&) = delete;
  WarningLog& operator=(const WarningLog&) = delete;

  // The warnings since the last call, in order.
  std::vector<std::string> take_warnings();

  // Adds a warning to all logs of the process. log_line() calls it for every warning.
  static void notify(std::string_view message);

 private:
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

}  // namespace tessera
