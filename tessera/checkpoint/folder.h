// The folder of a run's checkpoints: what is staged in it, published and pruned. Rank 0's; docs/format/checkpoint.md.
//
//   CheckpointFolder folder(run / "checkpoints");
//   const auto staged = folder.stage(step);              // .step-00000050.RANDOM.tmp
//   ... every rank writes its file into it ...
//   folder.publish(staged, manifest);                    // step-00000050, named by LATEST
//   folder.prune(2, 1);
//
// Nothing is overwritten, and only what has our names and our manifest is removed. One thread at a time.
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

  // Removes what saves and prunings left that were killed. Failures are logged.
  void sweep() noexcept;
  // A new folder to write the checkpoint of `step` into. Error kIo.
  std::filesystem::path stage(int64_t step);
  void drop(const std::filesystem::path& staged) noexcept;
  // Writes the manifest, renames the folder to a name that was free (step-XXXXXXXX, or step-XXXXXXXX-2 when that step
  // is there already) and makes LATEST name it. Returns the name; after an Error nothing of it stays.
  std::string publish(const std::filesystem::path& staged, Manifest manifest);
  // Removes checkpoints but the `keep_last` published last, the `keep_best` with the lowest validation loss, and the
  // one that LATEST names. keep_last 0 keeps all. Failures are logged.
  void prune(int64_t keep_last, int64_t keep_best) noexcept;
  // Makes LATEST name this published checkpoint, then moves those of later steps that saves wrote to the folder that
  // `aside` makes, which is asked only when there are any. Returns their names. Error kIo, also where that folder is on
  // another file system; kFormat for what is no checkpoint.
  std::vector<std::string> go_back_to(const std::string& name, const std::function<std::filesystem::path()>& aside);
  // What LATEST names, nullopt without LATEST. Error kFormat when that is no name of a checkpoint.
  static std::optional<std::string> latest_name(const std::filesystem::path& folder);
  // The checkpoint that a user means by the folder of a run or of its checkpoints: the one that LATEST names. Any other
  // path is returned as it is. Error as latest_name's.
  static std::filesystem::path find(const std::filesystem::path& path);
  // Whether `path` is called and lies as what publish() leaves.
  static bool is_of_a_run(const std::filesystem::path& path);

 private:
  // What prune() needs to know of a published checkpoint.
  struct Known {
    bool ours = false;
    int64_t number = 0, step = 0;  // published after all lower ones
    std::optional<double> validation_loss;
  };
  void look_around();
  Known examine(const std::string& name) const;
  void remove(const std::string& name) const;

  std::filesystem::path folder_;
  std::map<std::string, Known> known_;
};

}  // namespace tessera
