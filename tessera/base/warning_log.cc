#include "tessera/base/warning_log.h"

#include <utility>

namespace tessera {
namespace {

constexpr size_t kMostWarnings = 1000;

struct WarningLogs {
  std::mutex mutex;
  std::vector<WarningLog*> all;
};
WarningLogs& warning_logs() {
  static WarningLogs logs;
  return logs;
}

}  // namespace

WarningLog::WarningLog() {
  auto& logs = warning_logs();
  const std::lock_guard lock(logs.mutex);
  logs.all.push_back(this);
}

WarningLog::~WarningLog() {
  auto& logs = warning_logs();
  const std::lock_guard lock(logs.mutex);
  std::erase(logs.all, this);
}

std::vector<std::string> WarningLog::take_warnings() {
  const std::lock_guard lock(mutex_);
  return std::exchange(warnings_, {});
}

// The list of all WarningLogs is locked while the logs receive the message, so no log is destroyed during the call.
void WarningLog::notify(std::string_view message) {
  auto& logs = warning_logs();
  const std::lock_guard lock(logs.mutex);
  for (auto* log : logs.all) {
    const std::lock_guard own(log->mutex_);
    if (log->warnings_.size() < kMostWarnings) log->warnings_.emplace_back(message);
  }
}

}  // namespace tessera
