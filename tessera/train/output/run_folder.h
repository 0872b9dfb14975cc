// The folder of one run. This class alone writes its mark, lock, history, resolved recipe, metrics and exported model.
// docs/format/run.md.
//
//   RunFolder folder("runs/demo");                  // rank 0 only
//   folder.archive_history();                       // if the run starts anew
//   folder.write_recipe(recipe);                    // runs/demo/recipe.yaml
//   folder.open_history(resumed_step);              // drops lines of later steps
//   folder.append({.step = 7, .loss = 2.1, ...});
//   folder.publish_model(fresh);                    // runs/demo/model
//
// Only files that a run wrote are replaced, moved or removed. A folder that no run has marked is accepted only if it
// holds none of the names that a run writes. The lock is released with the object, or when the process ends for any
// reason. One object per run; not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "tessera/base/files/unique_fd.h"
#include "tessera/train/output/line_file.h"
#include "tessera/train/output/run_mark.h"
#include "tessera/train/output/step_metrics.h"

namespace tessera::train {

struct Recipe;

class RunFolder {
 public:
  // Creates, marks and locks the folder, and removes the staging files of a killed run. Error kConfig if a file that no
  // run wrote has a name that the run needs, or another run holds the lock (the message names its pid and host); kIo if
  // the folder cannot be created.
  explicit RunFolder(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }
  // A private folder on the same file system for files that are being written. The next run empties it.
  std::filesystem::path staging() const { return private_folder(path_) / "staging"; }

  // Moves checkpoints, metrics, events, profile, recipe and model of an earlier run to previous/NNN. Returns this
  // folder; empty if there was nothing to move. Error kIo.
  std::filesystem::path archive_history();

  // Call when a run resumes from `checkpoint`, a checkpoint of this folder that may be older than the last one. Makes
  // LATEST name `checkpoint`, and moves the checkpoints of later steps to previous/NNN/checkpoints. Returns the path of
  // previous/NNN/checkpoints; empty if there are no later checkpoints. Error kIo.
  std::filesystem::path archive_later_checkpoints(const std::filesystem::path& checkpoint);

  // Writes recipe.yaml; or recipe.resolved.yaml if the user changed recipe.yaml after a run wrote it. If both were
  // changed, logs a warning and writes nothing. Error kIo.
  void write_recipe(const Recipe& recipe);

  // Opens metrics.jsonl and events.jsonl for appending. With `resumed_step` above 0, drops lines of later steps, lines
  // without a step and an incomplete last line. With 0, moves both files, unless they are empty, to previous/NNN. Error
  // kIo; a file from which the lines could not be dropped is unchanged.
  void open_history(int64_t resumed_step);
  // Append one line to metrics.jsonl. Error kIo (full disk) leaves the file unchanged. Need open_history().
  void append(const StepMetrics& metrics);
  void append_validation(int64_t step, double validation_loss, double seconds);
  void append_early_stop(int64_t step, const std::string& reason);
  // Appends one line to events.jsonl, with the key `event_kind`: "session", "restart", "sample", "profile", "warning"
  // or "end". Errors as append().
  void append_event(int64_t step, const std::string& event_kind, const nlohmann::ordered_json& value);

  // Checks that publish_model() may replace model/. Error kConfig if model/ exists and its content is not what a run
  // exported (RunMark::owns).
  void check_model_replaceable() const;
  // Renames `fresh`, a folder in staging(), to model/, and removes the model that an earlier run exported. Where the
  // file system can exchange two folders, readers see either the old or the new one at any time. Error kIo if model/
  // exists and its content is not what a run exported.
  void publish_model(const std::filesystem::path& fresh);

 private:
  void take_lock();
  std::filesystem::path make_archive_folder() const;
  bool replace_own_file(const std::string& name, std::string_view content);

  std::filesystem::path path_;
  RunMark mark_;
  UniqueFd lock_;  // flock(2) is held while this file is open
  LineFile metrics_, events_;
};

}  // namespace tessera::train
