// The folder of a run's checkpoints: creates, publishes and deletes checkpoints. Used by rank 0 only.
// docs/format/checkpoint.md.
//
//   CheckpointFolder folder(run / "checkpoints");
//   const auto staged = folder.create_staged(step);      // .step-00000050.RANDOM.tmp
//   ... every rank writes its file into it ...
//   folder.publish(staged, manifest);                    // step-00000050, named by LATEST
//   folder.prune(2, 1);
//
// No file is overwritten. Only folders with a checkpoint's name and a valid manifest are deleted. Not thread-safe.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"

namespace tessera {

class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // Deletes the remains of interrupted saves and deletions. Failures are logged.
  void remove_leftovers() noexcept;
  // A new folder to write the checkpoint of `step` into. Error kIo.
  std::filesystem::path create_staged(int64_t step);
  void discard_staged(const std::filesystem::path& staged) noexcept;
  // Writes the manifest, renames the folder to a free name (step-XXXXXXXX, or step-XXXXXXXX-2 when the step exists) and
  // writes that name to LATEST. Returns the name. After an Error the new checkpoint is deleted.
  std::string publish(const std::filesystem::path& staged, Manifest manifest);
  // Deletes checkpoints, except the `keep_last` published last, the `keep_best` with the lowest validation loss, and
  // the one that LATEST names. keep_last 0 keeps all. Failures are logged.
  void prune(int64_t keep_last, int64_t keep_best) noexcept;
  // Writes the name of a published checkpoint to LATEST, then moves the checkpoints of later steps to the folder that
  // `make_archive_folder` creates. `make_archive_folder` is called only if there are later checkpoints. Moves only
  // checkpoints that a save wrote. Returns the names of the moved checkpoints. Errors: kIo, also when the archive
  // folder is on another file system; kFormat when `name` is not a checkpoint.
  std::vector<std::string> rewind_to(const std::string& name,
                                     const std::function<std::filesystem::path()>& make_archive_folder);
  // The contents of LATEST, or nullopt without LATEST. Error kFormat when LATEST does not contain the name of a
  // checkpoint.
  static std::optional<std::string> latest_name(const std::filesystem::path& folder);
  // The checkpoint that a user means by a path: for the folder of a run or of its checkpoints, the checkpoint that
  // LATEST names. Any other path is returned unchanged. Errors as in latest_name().
  static std::filesystem::path resolve_latest(const std::filesystem::path& path);
  // Whether `path` has the name of a published checkpoint and a LATEST file next to it.
  static bool is_run_checkpoint(const std::filesystem::path& path);

 private:
  // Properties of a published checkpoint that prune() needs.
  struct PublishedCheckpoint {
    bool ours = false;             // written by a save, and by nothing else
    int64_t number = 0, step = 0;  // `number` rises with each publish
    std::optional<double> validation_loss;
  };
  void refresh_known();
  PublishedCheckpoint examine(const std::string& name) const;
  void remove(const std::string& name) const;

  std::filesystem::path folder_;
  std::map<std::string, PublishedCheckpoint> known_;
};

}  // namespace tessera
