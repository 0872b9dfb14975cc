// A run that is at work, read again and again: each line of its files once, in bounded memory.
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
  // As read_run() (run_history.h), but for the limits; files of any size. After an error the next call goes on.
  RunHistory history();

 private:
  struct Source {
    GrowingLines lines;
    size_t skipped = 0;
  };
  std::filesystem::path folder_;
  HistoryLimits limits_;
  Source metrics_, events_;
  RunLines told_;
};

}  // namespace tessera::report
