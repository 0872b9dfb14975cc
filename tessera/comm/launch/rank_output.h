// Where the output of ranks goes: the terminal, files, or both. Internal to comm.
//
//   RankOutputs outputs({.log_dir = "logs", .tee = true, .shown = {0}}, "nightly");
//   outputs.begin_attempt(0, scratch);
//   const RankOutputs::Streams streams = outputs.open(3, 3);   // for the rank that is about to start
//   outputs.pump();                                            // when descriptor() can be read, look_again_after() is
//                                                              // over, and at the end
//
// Files are LOG_DIR/NAME/attempt_N/RANK/stdout.log and stderr.log, NAME a new folder. Ranks write to them directly, so
// that nothing they said is lost with a launcher, and no rank waits for one; what is to be shown is read from there.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm {

struct OutputOptions {
  std::string log_dir = "";  // empty: none
  bool tee = false;          // to files and, line by line with the rank in front, to the terminal
  std::vector<int> shown{};  // local ranks whose output the terminal shows; empty: all
};

class RankOutputs {
 public:
  struct Streams {
    int out = -1, err = -1;  // -1: those of this process
  };

  // Makes the folder of this run. Error kIo.
  RankOutputs(OutputOptions options, const std::string& name);
  RankOutputs(const RankOutputs&) = delete;
  RankOutputs& operator=(const RankOutputs&) = delete;

  const std::filesystem::path& folder() const { return folder_; }  // empty without log_dir
  // Files that nobody asked for are in `scratch`, which must live until the next attempt or the end.
  void begin_attempt(int attempt, const std::filesystem::path& scratch);
  Streams open(int rank, int local_rank);
  void close_own();  // the streams, once all ranks have started
  int descriptor() const { return notices_.get(); }
  // Shows what has come, of each stream at most 1 MiB: who writes without end keeps nobody from the others.
  void pump();
  // How long pump() may wait though nothing is told by descriptor(); nothing: for ever.
  std::optional<std::chrono::milliseconds> look_again_after() const;
  void finish();  // what is there by now, lines that have no end too
  // The end of what a rank whose output was not shown said on stderr, as whole lines; "" when it was shown.
  std::string last_words(int rank) const;
  // "logs/nightly_1a2b/attempt_0/3/stderr.log", or "".
  std::string kept_in(int rank) const;

 private:
  struct Stream {
    int rank = 0, to = 1;
    bool shown = false;
    std::filesystem::path path;
    UniqueFd own{}, read{};
    std::string line{};   // its begun last one
    bool more = false;    // than was read at once
    bool noticed = true;  // notices_ tells of it
  };
  int add(int rank, bool shown, int to);
  void pump(Stream& stream, int64_t most_bytes) const;

  const OutputOptions options_;
  std::filesystem::path folder_, attempt_;
  bool kept_ = false;
  UniqueFd notices_;  // of inotify; not open where the user has no more of them
  std::list<Stream> streams_;
};

// "0", "0,2": local ranks, as --log-rank and LOG_RANK have them. Error kConfig names `what`.
std::vector<int> parse_log_ranks(const std::string& text, const std::string& what);

}  // namespace tessera::comm
