// The warnings of this process, kept for whoever tells of the run afterwards.
//
//   WarningLog warnings;                       // from here on
//   ...
//   for (const auto& text : warnings.take())   // without "[tessera] rank 0: warning: "
//
// Thread-safe. Of more than 1,000 that nobody has taken the later ones are dropped.
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

  // Those since the last call, in order.
  std::vector<std::string> take();

  // Told of every warning by log_line().
  static void notify(std::string_view message);

 private:
  std::mutex mutex_;
  std::vector<std::string> kept_;
};

}  // namespace tessera
