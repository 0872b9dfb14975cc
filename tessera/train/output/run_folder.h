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

#include "tessera/train/output/line_file.h"
#include "tessera/train/output/run_mark.h"

namespace tessera::train {

struct Recipe;

// One line of metrics.jsonl. Numbers that are not finite are written as null.
struct StepMetrics {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;                  // before clipping
  std::optional<double> balance_loss{};  // of routers, where the model asks for it
  double lr = 0;
  int64_t tokens = 0;  // of this step, over all ranks, without padding
  double tokens_per_second = 0;
  int64_t memory_bytes = 0;  // the largest rank's
  double peak_share = 0;     // of the measured matmul peak of all ranks; 0..1
  double seconds = 0;        // of this step
  // Of these on rank 0 making the batch, and waiting for the copy of a save; what saving took since the last step.
  double data_seconds = 0, snapshot_seconds = 0, checkpoint_seconds = 0;
  std::vector<double> communication_seconds{};  // of each rank, waiting for others included
};

class RunFolder {
 public:
  // Makes and marks the folder and takes its lock. Error kConfig when something that no run wrote is in the way, or a
  // run holds the folder (the message names pid and host); kIo when the folder cannot be made. What a killed run was
  // writing is removed.
  explicit RunFolder(std::filesystem::path path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

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
  int lock_ = -1;
  LineFile metrics_, events_;
};

}  // namespace tessera::train
