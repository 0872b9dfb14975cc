// Directs the output of ranks to the terminal, to files, or to both. Internal to comm.
//
//   RankOutputs outputs({.log_dir = "logs", .tee = true, .shown = {0}}, "nightly");
//   outputs.begin_attempt(0, scratch);
//   const RankOutputs::Streams streams = outputs.open(3, 3);   // for the rank that is about to start
//   outputs.show_new_output();                                 // when descriptor() is readable, or after
//                                                              // poll_interval(), and at the end
//
// The files are LOG_DIR/NAME/attempt_N/RANK/stdout.log and stderr.log, where NAME is a new folder. Ranks write to the
// files directly: no output is lost when the launcher dies, and no rank waits for the launcher. The launcher reads the
// files to show output on the terminal.
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
  std::string log_dir = "";  // folder of the files; empty: no files are kept
  bool tee = false;          // write to files, and show each line on the terminal after the prefix "[rankN]: "
  std::vector<int> shown{};  // local ranks whose output is shown on the terminal; empty: all
};

class RankOutputs {
 public:
  struct Streams {
    int out = -1, err = -1;  // descriptors; -1: the rank inherits the stream of this process
  };

  // Makes the folder of this run, LOG_DIR/NAME_XXXX. Error kIo.
  RankOutputs(OutputOptions options, const std::string& name);
  RankOutputs(const RankOutputs&) = delete;
  RankOutputs& operator=(const RankOutputs&) = delete;

  const std::filesystem::path& folder() const { return folder_; }  // empty without log_dir
  // Starts a new attempt. Without log_dir, the output files that `tee` and `shown` need are made in the folder
  // `scratch`, which must exist until the last call for this attempt.
  void begin_attempt(int attempt, const std::filesystem::path& scratch);
  // Opens the streams of a rank that is about to start. Error kIo.
  Streams open(int rank, int local_rank);
  // Closes the launcher's descriptors of the streams that open() returned. To be called once all ranks have started.
  void close_own();
  int descriptor() const { return notices_.get(); }  // readable when a shown file has grown
  // Shows new output, at most 1 MiB per stream and call, so that one rank with endless output does not delay the
  // others.
  void show_new_output();
  // Time after which show_new_output() must be called although descriptor() is not readable; nullopt: no limit.
  std::optional<std::chrono::milliseconds> poll_interval() const;
  // Shows the output that has not been shown yet, including a last line without a line break.
  void finish();
  // The last lines of stderr (at most 20 lines and 4 KiB) of a rank whose output was not shown; "" when it was shown.
  std::string last_stderr_lines(int rank) const;
  // Path of the rank's stderr file, e.g. "logs/nightly_1a2b/attempt_0/3/stderr.log"; "" without log_dir.
  std::string stderr_path(int rank) const;

 private:
  struct RankStream {
    int rank = 0, to = 1;  // `to`: descriptor of the terminal stream, 1 or 2
    bool shown = false;
    std::filesystem::path path;
    UniqueFd own{}, read{};
    std::string line{};   // the begun last line
    bool more = false;    // the last show_new_output() left output unread
    bool noticed = true;  // inotify reports changes of this file
  };
  int add(int rank, bool shown, int to);
  void show_new_output(RankStream& stream, int64_t max_bytes) const;

  const OutputOptions options_;
  std::filesystem::path folder_, attempt_;
  bool kept_ = false;  // files are kept in log_dir
  UniqueFd notices_;   // inotify descriptor; not open when the user's limit of inotify instances is reached
  std::list<RankStream> streams_;
};

// Parses a list of local ranks such as "0" or "0,2", the value of --log-rank and LOG_RANK. Error kConfig names `flag`,
// the flag or variable.
std::vector<int> parse_log_ranks(const std::string& text, const std::string& flag);

}  // namespace tessera::comm
