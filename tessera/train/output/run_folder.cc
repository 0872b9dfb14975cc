#include "tessera/train/output/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/train/recipe/recipe_print.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetricsName = "metrics.jsonl";
constexpr const char* kEventsName = "events.jsonl";
constexpr size_t kMaxRanksListed = 64;  // a line of metrics lists the seconds of single ranks up to this world size
constexpr const char* kModelName = "model";

// Returns the text that the holder of the lock wrote into the lock file `lock`, such as "pid 71 on host a"; "unknown"
// if there is none. The lock file may hold any bytes; only its first line is used.
std::string holder_of(int lock) {
  char text[300] = {};
  const ssize_t got = ::pread(lock, text, sizeof text - 1, 0);
  const std::string holder = first_line(std::string_view(text, got > 0 ? static_cast<size_t>(got) : 0));
  return holder.empty() ? "unknown" : holder;
}

// Runs `action`, and turns an exception of std::filesystem into Error kIo, whose message begins with `message_prefix`.
template <class Action>
auto on_disk(const char* message_prefix, Action&& action) {
  try {
    return action();
  } catch (const fs::filesystem_error& error) {
    raise(ErrorKind::kIo, "[train.run_folder] {}: {}", message_prefix, error.what());
  }
}

// Creates the folder and reads the run's mark in it (.tessera/run.json, RunMark). The folder is created first: if there
// is a file at its path, the error then says so, instead of saying that the mark cannot be read.
RunMark make_folder_and_read_mark(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  TESSERA_CHECK(!error && fs::is_directory(path), ErrorKind::kIo,
                "[train.run_folder] {}: cannot be made a folder: {}. Choose another checkpoint.dir.", path.string(),
                error ? error.message() : "a file is in the way");
  return on_disk("the folder cannot be read", [&] {
    RunMark mark(path);
    if (!mark.is_set()) mark.check_names_unused();
    return mark;
  });
}

// Exchanges two folders atomically. Returns false and changes nothing if the file system cannot do this.
bool exchange(const fs::path& a, const fs::path& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

}  // namespace

RunFolder::RunFolder(fs::path path)
    : path_(std::move(path)),
      mark_(make_folder_and_read_mark(path_)),
      metrics_(path_ / kMetricsName),
      events_(path_ / kEventsName) {
  // make_folder_and_read_mark() checks the folder without the lock, so that errors are reported early. Files may be
  // removed or written only while the lock is held.
  take_lock();
  on_disk("the folder cannot be prepared", [&] {
    mark_ = RunMark(path_);  // again, as another run may have marked the folder before this one had the lock
    if (!mark_.is_set()) mark_.check_names_unused();
    fs::remove_all(staging());
    fs::create_directories(staging());
    mark_.set();
  });
}

void RunFolder::take_lock() {
  const auto lock_path = private_folder(path_) / "lock";
  std::error_code error;
  fs::create_directories(lock_path.parent_path(), error);
  lock_.reset(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644));
  TESSERA_CHECK(lock_.open(), ErrorKind::kIo, "[train.run_folder] {}: {}", lock_path.string(), std::strerror(errno));
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    const int reason = errno;
    const std::string holder = holder_of(lock_.get());
    TESSERA_CHECK(reason != EWOULDBLOCK, ErrorKind::kConfig,
                  "[train.run_folder] {}: another run holds this folder: {}. Wait for it, stop it, or choose another "
                  "checkpoint.dir.",
                  path_.string(), holder);
    raise(ErrorKind::kIo, "[train.run_folder] {}: cannot be locked: {}", lock_path.string(), std::strerror(reason));
  }
  const std::string holder = fmt::format("pid {} on {}\n", ::getpid(), host_name());
  // The lock file gets the pid and host of this run, only for the error message of another run that finds the folder
  // locked. The lock itself is held by flock(2).
  if (::ftruncate(lock_.get(), 0) != 0 || ::pwrite(lock_.get(), holder.data(), holder.size(), 0) < 0) {
    log_warning("[train.run_folder] {}: {}", lock_path.string(), std::strerror(errno));
  }
}

// Creates the next free folder previous/NNN. mkdir(2) fails for an existing one, so no two callers get the same folder.
fs::path RunFolder::make_archive_folder() const {
  std::error_code error;
  fs::create_directories(path_ / "previous", error);
  for (int number = 1;; ++number) {
    auto path = path_ / "previous" / fmt::format("{:03}", number);
    if (::mkdir(path.c_str(), 0755) == 0) return path;
    TESSERA_CHECK(errno == EEXIST, ErrorKind::kIo, "[train.run_folder] {}: {}", path.string(), std::strerror(errno));
  }
}

fs::path RunFolder::archive_history() {
  fs::path into;
  // The checkpoints are moved first. If the run is killed before all files are moved, the next run finds no checkpoint
  // to resume from, and so moves the remaining files.
  for (const char* name : {"checkpoints", kMetricsName, kEventsName, "tensorboard", "profile", "recipe.yaml",
                           "recipe.resolved.yaml", "model"}) {
    const auto status = fs::symlink_status(path_ / name);
    if (!fs::exists(status) || (fs::is_directory(status) && fs::is_empty(path_ / name))) continue;
    // Users may have files or folders of their own with the names recipe.yaml, recipe.resolved.yaml and model. So these
    // are moved to the archive only if a run wrote their present content (RunMark::owns).
    const std::string_view ours_if_unchanged = name;
    const bool shared = ours_if_unchanged.starts_with("recipe") || ours_if_unchanged == "model";
    if (shared && !mark_.owns(name)) continue;
    if (into.empty()) into = make_archive_folder();
    on_disk("an earlier history cannot be put aside", [&] { fs::rename(path_ / name, into / name); });
    if (shared) mark_.keep_current_fingerprint(name);
  }
  if (!into.empty()) sync_folder(path_);
  return into;
}

fs::path RunFolder::archive_later_checkpoints(const fs::path& checkpoint) {
  fs::path into;
  on_disk("later checkpoints cannot be put aside", [&] {
    CheckpointFolder(checkpoints()).rewind_to(checkpoint.filename().string(), [&] {
      into = make_archive_folder() / "checkpoints";
      fs::create_directory(into);
      return into;
    });
  });
  return into;
}

// Replaces a file only if a run wrote its present content; otherwise the file is the user's, and the result is false.
// The run's mark (.tessera/run.json, RunMark) gets the fingerprint of the new content before the rename, and loses the
// old fingerprint after the rename. So whenever the process is killed, the mark has the fingerprint of the file that is
// there, and the next run knows that a run wrote this file.
bool RunFolder::replace_own_file(const std::string& name, std::string_view content) {
  if (fs::exists(fs::symlink_status(path_ / name)) && !mark_.owns(name)) return false;
  const auto staged = staging() / name;
  publish_file(staged, content);
  mark_.add_fingerprint(name, fingerprint_of(staged));
  fs::rename(staged, path_ / name);
  sync_folder(path_);
  mark_.keep_current_fingerprint(name);
  return true;
}

void RunFolder::write_recipe(const Recipe& recipe) {
  const auto text = to_yaml(recipe);
  if (replace_own_file("recipe.yaml", text) || replace_own_file("recipe.resolved.yaml", text)) return;
  log_warning(
      "[train.run_folder] {}: recipe.yaml and recipe.resolved.yaml are not as a run wrote them and are left alone",
      path_.string());
}

void RunFolder::open_history(int64_t resumed_step) {
  fs::path aside;
  for (auto* file : {&metrics_, &events_}) {
    std::error_code error;
    if (resumed_step > 0) {
      file->keep_until(resumed_step, staging());
    } else if (fs::file_size(file->path(), error) > 0 && !error) {
      if (aside.empty()) aside = make_archive_folder();
      on_disk("an earlier history cannot be put aside",
              [&] { fs::rename(file->path(), aside / file->path().filename()); });
    }
    file->open();
  }
}

void RunFolder::check_model_replaceable() const {
  const auto model = path_ / kModelName;
  if (!fs::exists(fs::symlink_status(model)) || mark_.owns(kModelName)) return;
  raise(ErrorKind::kConfig,
        "[train.run_folder] {}: is not as a run exported it, and the export of this run would replace it. Move it, "
        "choose another checkpoint.dir, or set checkpoint.export=never.",
        model.string());
}

// Does for the folder model/ what replace_own_file() does for a file: adds the fingerprint of `fresh` to the run's
// mark, moves `fresh` to model/ (by an exchange of the two folders or by renames), and then removes the old fingerprint
// from the mark.
void RunFolder::publish_model(const fs::path& fresh) {
  const auto model = path_ / kModelName;
  const bool replaces = fs::exists(fs::symlink_status(model));
  TESSERA_CHECK(
      !replaces || mark_.owns(kModelName), ErrorKind::kIo,
      "[train.export] {}: is not as a run exported it, and is left alone. Move it and start the run again, which "
      "exports from its last checkpoint.",
      model.string());
  mark_.add_fingerprint(kModelName, fingerprint_of(fresh));
  on_disk("the model cannot be published", [&] {
    if (replaces && exchange(fresh, model)) return;
    const auto old = staging() / "model.old";
    if (replaces) fs::rename(model, old);
    fs::rename(fresh, model);
    fs::remove_all(old);
  });
  sync_folder(path_);
  mark_.keep_current_fingerprint(kModelName);
  std::error_code ignored;
  fs::remove_all(fresh, ignored);  // after exchange() `fresh` is the old model; if this fails, the next run removes it
}

void RunFolder::append(const StepMetrics& metrics) {
  nlohmann::ordered_json line = {
      {"step", metrics.step},
      {"loss", metrics.loss},
      {"grad_norm", metrics.grad_norm},
      {"lr", metrics.lr},
      {"tokens", metrics.tokens},
      {"tokens_per_second", metrics.tokens_per_second},
      {"memory_bytes", metrics.memory_bytes},
      {"peak_share", metrics.peak_share},
      {"seconds", metrics.seconds},
  };
  if (metrics.balance_loss) line["balance_loss"] = *metrics.balance_loss;
  const auto& by_rank = metrics.communication_seconds;
  if (!by_rank.empty()) {
    // A collective ends on all ranks at about the same time. So the rank with the fewest seconds in collectives has
    // entered them last and waited least: its seconds count as communication. The mean over all ranks of the seconds
    // beyond these counts as waiting.
    const double mean = std::accumulate(by_rank.begin(), by_rank.end(), 0.0) / static_cast<double>(by_rank.size());
    const double least = *std::ranges::min_element(by_rank);
    line["parts"] = {
        {"compute", std::max(metrics.seconds - mean - metrics.data_seconds - metrics.snapshot_seconds, 0.0)},
        {"communication", least},
        {"wait", mean - least},
        {"data", metrics.data_seconds},
        {"checkpoint", metrics.checkpoint_seconds}};
    if (by_rank.size() > 1 && by_rank.size() <= kMaxRanksListed) line["communication_by_rank"] = by_rank;
  }
  metrics_.append(dump_json(line));
}

void RunFolder::append_validation(int64_t step, double validation_loss, double seconds) {
  metrics_.append(dump_json({{"step", step}, {"validation_loss", validation_loss}, {"seconds", seconds}}));
}

void RunFolder::append_event(int64_t step, const std::string& event_kind, const nlohmann::ordered_json& value) {
  events_.append(dump_json({{"step", step}, {event_kind, value}}));
}

void RunFolder::append_early_stop(int64_t step, const std::string& reason) {
  metrics_.append(dump_json({{"step", step}, {"early_stop", reason}}));
}

}  // namespace tessera::train
