#include "tessera/comm/launch/rank_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/random_hex.h"

namespace tessera::comm {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLongestLine = size_t{1} << 16;
constexpr int64_t kMaxBytesAtOnce = int64_t{1} << 20;
constexpr size_t kLastBytes = 4096;
constexpr size_t kLastLines = 20;

// Replaces all characters but letters, digits, '-' and '_' by '_', and cuts the name to 60 characters.
std::string folder_name(std::string name) {
  for (char& c : name) {
    const bool plain =
        (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '_';
    if (!plain) c = '_';
  }
  return name.substr(0, 60);
}

void write_all(int to, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(to, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

}  // namespace

RankOutputs::RankOutputs(OutputOptions options, const std::string& name) : options_(std::move(options)) {
  if (options_.log_dir.empty()) return;
  std::error_code failed;
  fs::create_directories(options_.log_dir, failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "[launch] --log-dir {}: {}", options_.log_dir, failed.message());
  for (int tries = 0; folder_.empty(); ++tries) {
    const fs::path path = fs::path(options_.log_dir) / fmt::format("{}_{}", folder_name(name), random_hex(4));
    if (::mkdir(path.c_str(), 0755) == 0) folder_ = path;
    TESSERA_CHECK(!folder_.empty() || (errno == EEXIST && tries < 100), ErrorKind::kIo, "[launch] --log-dir {}: {}",
                  path.string(), std::strerror(errno));
  }
}

// inotify is needed only if output is both written to files and shown. It wakes the launcher when a file has grown;
// files for which no watch could be made are read every 200 ms instead (poll_interval).
void RankOutputs::begin_attempt(int attempt, const fs::path& scratch) {
  streams_.clear();
  kept_ = !folder_.empty();
  attempt_ = (kept_ ? folder_ : scratch) / fmt::format("attempt_{}", attempt);
  const bool reads = options_.tee || (kept_ && !options_.shown.empty());
  notices_.reset(reads ? ::inotify_init1(IN_CLOEXEC | IN_NONBLOCK) : -1);
}

// A rank whose output is shown (OutputOptions::shown) inherits the launcher's streams if no files are kept and --tee is
// not given. Every other rank writes to files. `tails`: the launcher reads these files and shows their lines.
RankOutputs::Streams RankOutputs::open(int rank, int local_rank) {
  const auto& shown = options_.shown;
  const bool is_shown = shown.empty() || std::ranges::find(shown, local_rank) != shown.end();
  if (!kept_ && !options_.tee && is_shown) return {};
  const bool tails = is_shown && (options_.tee || !shown.empty());
  return {.out = add(rank, tails, STDOUT_FILENO), .err = add(rank, tails, STDERR_FILENO)};
}

int RankOutputs::add(int rank, bool shown, int to) {
  const fs::path path = attempt_ / std::to_string(rank) / (to == STDOUT_FILENO ? "stdout.log" : "stderr.log");
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  RankStream stream{.rank = rank, .to = to, .shown = shown, .path = path};
  stream.own.reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644));
  TESSERA_CHECK(stream.own.open(), ErrorKind::kIo, "[launch] {}: {}", path.string(),
                failed ? failed.message() : std::strerror(errno));
  if (shown) {
    stream.read.reset(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    stream.noticed = ::inotify_add_watch(notices_.get(), path.c_str(), IN_MODIFY) >= 0;
  }
  streams_.push_back(std::move(stream));
  return streams_.back().own.get();
}

void RankOutputs::close_own() {
  for (RankStream& stream : streams_) stream.own.reset();
}

// The events of inotify only wake the launcher. They are discarded, and every shown stream is read.
void RankOutputs::show_new_output() {
  char notices[4096];
  while (notices_.open() && ::read(notices_.get(), notices, sizeof notices) > 0) {
  }
  for (RankStream& stream : streams_) show_new_output(stream, kMaxBytesAtOnce);
}

std::optional<std::chrono::milliseconds> RankOutputs::poll_interval() const {
  constexpr std::chrono::milliseconds kUnnoticed{200};
  std::optional<std::chrono::milliseconds> after;
  for (const RankStream& stream : streams_) {
    if (stream.more) return std::chrono::milliseconds(0);
    if (stream.read.open() && !stream.noticed) after = kUnnoticed;
  }
  return after;
}

// Shows whole lines. A line without an end is kept in `stream.line` until the rest arrives, unless it reaches 64 KiB:
// then it is shown in parts, so that memory stays bounded.
void RankOutputs::show_new_output(RankStream& stream, int64_t max_bytes) const {
  if (!stream.read.open()) return;
  const std::string before = fmt::format("[rank{}]: ", stream.rank);
  std::string shown;
  char chunk[16384];
  stream.more = false;
  for (ssize_t got = 0; (got = ::read(stream.read.get(), chunk, sizeof chunk)) > 0;) {
    std::string_view rest(chunk, static_cast<size_t>(got));
    while (!rest.empty()) {
      const size_t end = std::min(rest.find('\n'), rest.size());
      stream.line += rest.substr(0, end);
      rest.remove_prefix(end);
      if (rest.empty() && stream.line.size() < kLongestLine) break;
      if (!rest.empty()) rest.remove_prefix(1);
      shown += before + stream.line + "\n";
      stream.line.clear();
    }
    write_all(stream.to, shown);
    shown.clear();
    max_bytes -= got;
    if (max_bytes <= 0) {
      stream.more = true;
      return;
    }
  }
}

// The size of the file is read once, and the file is shown up to this size: a process that a rank left behind may still
// write to the file, and finish() must not wait for the end of that process.
void RankOutputs::finish() {
  for (RankStream& stream : streams_) {
    struct stat status {};
    if (stream.read.open() && ::fstat(stream.read.get(), &status) == 0) {
      show_new_output(stream, status.st_size - ::lseek(stream.read.get(), 0, SEEK_CUR));
    }
    stream.more = false;
    if (!stream.line.empty()) write_all(stream.to, fmt::format("[rank{}]: {}\n", stream.rank, stream.line));
    stream.line.clear();
  }
}

// Reads the last 4 KiB of the file with the rank's stderr. If the file is longer than that, the first line read may be
// cut and is dropped. Returns at most the last 20 lines.
std::string RankOutputs::last_stderr_lines(int rank) const {
  const auto found = std::ranges::find_if(
      streams_, [&](const RankStream& stream) { return stream.rank == rank && stream.to == STDERR_FILENO; });
  if (found == streams_.end() || found->shown) return "";
  const UniqueFd file(::open(found->path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!file.open() || ::fstat(file.get(), &status) != 0) return "";
  std::string text(kLastBytes, '\0');
  const off_t begin = std::max<off_t>(0, status.st_size - static_cast<off_t>(kLastBytes));
  const ssize_t got = ::pread(file.get(), text.data(), text.size(), begin);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  if (begin > 0 && !text.empty()) text.erase(0, std::min(text.find('\n'), text.size() - 1) + 1);
  while (static_cast<size_t>(std::ranges::count(text, '\n')) > kLastLines) text.erase(0, text.find('\n') + 1);
  if (!text.empty() && text.back() != '\n') text += '\n';
  return text;
}

std::string RankOutputs::stderr_path(int rank) const {
  return kept_ ? (attempt_ / std::to_string(rank) / "stderr.log").string() : "";
}

std::vector<int> parse_log_ranks(const std::string& text, const std::string& flag) {
  std::vector<int> ranks;
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view word = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(word.size() + 1, rest.size()));
    const auto rank = parse_number<int>(word);
    TESSERA_CHECK(rank && *rank >= 0 && *rank < 4096, ErrorKind::kConfig,
                  "[launch] {} '{}': wanted local ranks, like 0 or 0,2", flag, text);
    ranks.push_back(*rank);
  }
  return ranks;
}

}  // namespace tessera::comm
