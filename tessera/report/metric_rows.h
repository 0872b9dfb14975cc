// Collects one row of values per step, in bounded memory. When there are too many rows, each range of steps keeps only
// the rows with the smallest loss, the largest loss and the largest gradient norm, so that a spike is never lost.
//
//   MetricRows rows({.loss = "loss", .max_rows = 16384});
//   rows.put(1, {{"loss", 4.0}, {"lr", 0.1}});
//   rows.series();
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/report/run_history.h"
#include "tessera/train/output/outliers.h"

namespace tessera::report {

struct MetricRowsOptions {
  std::string loss = "loss";   // the column of the loss
  size_t max_rows = SIZE_MAX;  // the most rows that are kept, at least 16
};

class MetricRows {
 public:
  explicit MetricRows(MetricRowsOptions options) : options_(std::move(options)) {}

  // Sets the row of a step, and replaces an earlier row of the same step.
  void put(int64_t step, const std::map<std::string, double>& values);
  size_t step_count() const { return step_count_; }  // number of steps, including those whose rows were dropped
  MetricSeries series() const;
  // z-scores as the run computed them (train/output/outliers.h), one per entry of series().step; empty if no step has
  // this value.
  std::vector<double> loss_scores() const;
  std::vector<double> grad_norm_scores() const;

 private:
  struct Row {
    std::vector<double> values{};                      // by index of columns_; shorter if columns were added later
    double loss_z = kMissing, grad_norm_z = kMissing;  // set for rows up to last_scored_step_
  };
  double value(const Row& row, const std::string& column) const;
  std::vector<double> scores(const std::string& column, const train::OutlierDetector& seen, double Row::*kept) const;
  void thin_out();

  MetricRowsOptions options_;
  std::map<std::string, size_t> columns_;  // name -> index in Row::values
  std::map<int64_t, Row> rows_;
  size_t step_count_ = 0;
  int64_t steps_per_range_ = 1;                 // length of a range of steps, of which three rows are kept
  int64_t last_scored_step_ = -1;               // the last step whose z-scores are stored in its row
  train::OutlierDetector losses_, grad_norms_;  // their windows end at step last_scored_step_
};

}  // namespace tessera::report
