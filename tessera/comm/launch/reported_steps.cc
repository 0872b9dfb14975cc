#include "tessera/comm/launch/reported_steps.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/number.h"

namespace tessera::comm {

// The file is opened once. Every write has the same length and goes to offset 0, so the file always holds exactly one
// number of 19 digits.
void report_step(int64_t step) noexcept {
  static const int file = [] {
    const char* path = std::getenv("TESSERA_PROGRESS_FILE");
    return path && *path ? ::open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600) : -1;
  }();
  if (file < 0) return;
  char text[32];
  const int length = std::snprintf(text, sizeof text, "%019lld\n", static_cast<long long>(step));
  [[maybe_unused]] const auto written = ::pwrite(file, text, static_cast<size_t>(length), 0);
}

std::optional<int64_t> read_reported_step(const std::filesystem::path& file) {
  try {
    const auto step = parse_number<int64_t>(first_line(read_file(file, 64)));
    return step && *step >= 0 ? step : std::nullopt;
  } catch (const Error&) {  // no file
    return std::nullopt;
  }
}

std::optional<RestartReason> restart_reason() {
  const char* text = std::getenv("TESSERA_RESTART_REASON");
  const char* count = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const int attempt = count ? std::atoi(count) : 0;
  if (!text || !*text || attempt <= 0) return std::nullopt;
  return RestartReason{.attempt = attempt, .text = text};
}

}  // namespace tessera::comm
