// One row of values a step, in bounded memory: where there are too many, of each stretch of steps stay the rows with
// the least and the largest loss and the largest gradient norm, so that a spike is never lost.
//
//   StepRows rows({.loss = "loss", .most = 16384});
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

struct StepRowsOptions {
  std::string loss = "loss";  // the column whose spikes stay
  size_t most = SIZE_MAX;     // rows that are kept, at least 16
};

class StepRows {
 public:
  explicit StepRows(StepRowsOptions options) : options_(std::move(options)) {}

  // In place of what was told of that step before.
  void put(int64_t step, const std::map<std::string, double>& values);
  size_t told() const { return told_; }  // steps, those that are not kept among them
  Series series() const;
  // z-scores as the run saw them (train/output/outliers.h), as long as series().step; empty where no step has that
  // value.
  std::vector<double> loss_scores() const;
  std::vector<double> grad_norm_scores() const;

 private:
  struct Row {
    std::vector<double> values{};                      // by column, as many as there were when it came
    double loss_z = kNothing, grad_norm_z = kNothing;  // of rows up to settled_
  };
  double value(const Row& row, const std::string& column) const;
  std::vector<double> scores(const std::string& column, const train::OutlierDetector& seen, double Row::*kept) const;
  void thin_out();

  StepRowsOptions options_;
  std::map<std::string, size_t> columns_;
  std::map<int64_t, Row> rows_;
  size_t told_ = 0;
  int64_t stretch_ = 1;   // steps, of which three rows stay
  int64_t settled_ = -1;  // the last step whose scores are in its row, as rows before it may be gone
  train::OutlierDetector losses_, grad_norms_;  // up to there
};

}  // namespace tessera::report
