// The folder of one run, and the one owner of everything in it: mark, lock, history, resolved recipe, metrics, exported
// model. docs/format/run.md.
//
//   RunFolder folder("runs/demo");                  // rank 0 only
//   folder.put_aside_history();                     // when the run starts anew
//   folder.write_recipe(recipe);                    // runs/demo/recipe.yaml
//   folder.open_history(resumed_step);              // lines after that step are dropped
//   folder.append({.step = 7, .loss = 2.1, ...});
//   folder.publish_model(fresh);                    // runs/demo/model
//
// Only what a run wrote is replaced, moved or removed; a folder that is no run's is taken only while nothing in it has
// one of our names. The lock goes with the object, or with the process however it ends. One object a run; not
// thread-safe.
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
  // Makes and marks the folder and takes its lock. Error kConfig when something that no run wrote is in the way, or a
  // run holds the folder (the message names pid and host); kIo when the folder cannot be made. What a killed run was
  // writing is removed.
  explicit RunFolder(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path checkpoints() const { return path_ / "checkpoints"; }
  // On the folder's file system, private to the run and emptied when the next one starts.
  std::filesystem::path staging() const { return private_folder(path_) / "staging"; }

  // Moves checkpoints, metrics, events, recipe and model of an earlier history to previous/NNN, which is returned;
  // empty when there was nothing. Error kIo.
  std::filesystem::path put_aside_history();

  // For a run that goes on from a checkpoint of its own which is not the last: LATEST names it, and checkpoints of
  // later steps go to previous/NNN/checkpoints, which is returned; empty when there are none. Error kIo.
  std::filesystem::path put_aside_beyond(const std::filesystem::path& checkpoint);

  // Leaves a recipe.yaml alone that was changed since a run wrote it, and writes recipe.resolved.yaml.
  void write_recipe(const Recipe& recipe);

  // Opens metrics.jsonl and events.jsonl for appending. Lines of steps after `resumed_step`, a torn last line and lines
  // that are neither's are dropped; when nothing is resumed, 0, the whole files are put aside. Error kIo leaves a file
  // as it was.
  void open_history(int64_t resumed_step);
  // One whole line each, or Error kIo (full disk) and the file as before. Needs open_history().
  void append(const StepMetrics& metrics);
  void append_validation(int64_t step, double validation_loss, double seconds);
  void append_early_stop(int64_t step, const std::string& reason);
  // What is no number, a line of events.jsonl: WHAT is "session", "restart", "sample", "profile", "warning" or
  // "end".
  void append_event(int64_t step, const std::string& what, const nlohmann::ordered_json& value);

  // Error kConfig when model/ holds something that no run exported.
  void check_model() const;
  // Makes `fresh`, a folder in staging(), model/; the run's own earlier one goes. Readers see one or the other. Error
  // kIo when model/ is not a run's.
  void publish_model(const std::filesystem::path& fresh);

 private:
  void take_lock();
  std::filesystem::path next_previous() const;
  bool publish_own(const std::string& name, std::string_view content);

  std::filesystem::path path_;
  RunMark mark_;
  UniqueFd lock_;  // held until it is closed
  LineFile metrics_, events_;
};

}  // namespace tessera::train
