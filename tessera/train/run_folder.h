// The folder of one run: the lock that keeps a second run out, the resolved recipe, metrics.jsonl.
//
//   RunFolder folder("runs/demo");                  // rank 0 only
//   folder.write_recipe(recipe);                    // runs/demo/recipe.yaml
//   folder.open_metrics(resumed_step);              // lines after that step are dropped
//   folder.append({.step = 7, .loss = 2.1, ...});
//
// The lock goes with the object, or with the process however it ends. One object a run; not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace tessera::train {

struct Recipe;

// One line of metrics.jsonl. Numbers that are not finite are written as null.
struct StepMetrics {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;  // before clipping
  double lr = 0;
  int64_t tokens = 0;  // of this step, over all ranks, without padding
  double tokens_per_second = 0;
  int64_t memory_bytes = 0;  // the largest rank's
  double peak_share = 0;     // of the measured matmul peak of all ranks; 0..1
  double seconds = 0;        // of this step
};

class RunFolder {
 public:
  // Makes the folder and takes its lock. Error kConfig names pid and host of a run that holds it; kIo when the folder
  // cannot be made.
  explicit RunFolder(std::filesystem::path path);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void write_recipe(const Recipe& recipe);

  // Opens metrics.jsonl for appending. Lines of steps after `resumed_step`, a torn last line and lines that are no
  // metrics are dropped; 0 starts the file anew. Error kIo leaves the file as it was.
  void open_metrics(int64_t resumed_step);
  // One whole line each, or Error kIo (full disk) and the file as before. Needs open_metrics().
  void append(const StepMetrics& metrics);
  void append_validation(int64_t step, double validation_loss, double seconds);

 private:
  void append_line(std::string_view line);

  std::filesystem::path path_;
  int lock_ = -1;
  int metrics_ = -1;
};

}  // namespace tessera::train
