// What one step of a run came to, on rank 0: a line of metrics.jsonl and a line on stderr.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace tessera::train {

// Numbers that are not finite are written to metrics.jsonl as null. The z-scores (outliers.h) and `skipped` are shown
// on stderr alone.
struct StepMetrics {
  int64_t step = 0;
  double loss = 0;
  double loss_z = std::numeric_limits<double>::quiet_NaN();  // NaN: not known yet
  double grad_norm = 0;                                      // before clipping
  double grad_norm_z = std::numeric_limits<double>::quiet_NaN();
  std::optional<double> balance_loss{};  // of routers, where the model asks for it
  double lr = 0;
  int64_t tokens = 0;  // of this step, over all ranks, without padding
  double tokens_per_second = 0;
  int64_t memory_bytes = 0;  // the largest rank's
  double peak_share = 0;     // of the measured matmul peak of all ranks; 0..1
  double seconds = 0;        // of this step, from the batch to the update
  bool skipped = false;      // the step's loss or norm was not finite and it was left out
  // Of these on rank 0 making the batch, and waiting for the copy of a save; what saving took since the last step, that
  // wait included.
  double data_seconds = 0, snapshot_seconds = 0, checkpoint_seconds = 0;
  std::vector<double> communication_seconds{};  // of each rank, waiting for others included
};

}  // namespace tessera::train
