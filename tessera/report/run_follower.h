// Reads the history of a running run repeatedly. Each line of its files is read once, and memory is bounded.
//
//   RunFollower follower("runs/demo", {.rows = 16384, .events = 200});
//   const RunHistory now = follower.history();
//
// Not thread-safe.
#pragma once

#include <filesystem>

#include "tessera/report/growing_lines.h"
#include "tessera/report/run_lines.h"

namespace tessera::report {

class RunFollower {
 public:
  RunFollower(std::filesystem::path folder, HistoryLimits limits);
  // Returns the history so far, like read_run() (run_history.h), but keeps no more than HistoryLimits allows and reads
  // files of any size. After an error the next call continues. Errors as read_run(), except kFormat for a file above 1
  // GiB.
  RunHistory history();

 private:
  struct FollowedFile {
    GrowingLines lines;
    size_t skipped = 0;  // lines that could not be read
  };
  std::filesystem::path folder_;
  HistoryLimits limits_;
  FollowedFile metrics_, events_;
  RunLines lines_;
};

}  // namespace tessera::report
