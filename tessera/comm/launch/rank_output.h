// Where the output of ranks goes: the terminal, files, or both. Internal to comm.
//
//   RankOutputs outputs({.log_dir = "logs", .tee = true, .shown = {0}}, "nightly");
//   outputs.begin_attempt(0, scratch);
//   const RankOutputs::Streams streams = outputs.open(3, 3);   // for the rank that is about to start
//   outputs.pump();                                            // when descriptor() can be read, and at the end
//
// Files are LOG_DIR/NAME/attempt_N/RANK/stdout.log and stderr.log, NAME a new folder. Ranks write to them directly, so
// that nothing they said is lost with a launcher, and no rank waits for one; what is to be shown is read from there.
#pragma once

#include <filesystem>
#include <list>
#include <string>
#include <vector>

#include "tessera/base/unique_fd.h"

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
  void pump();
  void finish();  // what is left, lines that have no end too
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
    std::string line{};  // its begun last one
  };
  int add(int rank, bool shown, int to);
  void pump(Stream& stream) const;

  const OutputOptions options_;
  std::filesystem::path folder_, attempt_;
  bool kept_ = false;
  UniqueFd notices_;  // of inotify
  std::list<Stream> streams_;
};

// "0", "0,2": local ranks, as --log-rank and LOG_RANK have them. Error kConfig names `what`.
std::vector<int> parse_log_ranks(const std::string& text, const std::string& what);

}  // namespace tessera::comm
