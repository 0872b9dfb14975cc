// The metrics of one step, on rank 0. They make a line of metrics.jsonl and a line on stderr.
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
  double loss_z = std::numeric_limits<double>::quiet_NaN();  // z-score; NaN: too few values before
  double grad_norm = 0;                                      // before clipping
  double grad_norm_z = std::numeric_limits<double>::quiet_NaN();
  std::optional<double> balance_loss{};  // load-balance loss of the routers, if enabled
  double lr = 0;
  int64_t tokens = 0;  // in the global batch, without padding
  double tokens_per_second = 0;
  int64_t memory_bytes = 0;  // the largest resident set among the ranks
  double peak_share = 0;     // achieved FLOP/s divided by the measured matmul peak of all ranks; 0..1
  double seconds = 0;        // wall time of this step on rank 0, from reading the batch to the update
  bool skipped = false;      // loss or norm was not finite, and the update was skipped
  // Seconds of rank 0: making the batch; waiting until a save has copied the tensors; saving since the last step, which
  // includes this wait. The first two are part of `seconds`.
  double data_seconds = 0, snapshot_seconds = 0, checkpoint_seconds = 0;
  std::vector<double> communication_seconds{};  // in collectives, for each rank, including waiting for other ranks
};

}  // namespace tessera::train
