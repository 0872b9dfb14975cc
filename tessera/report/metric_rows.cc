#include "tessera/report/metric_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace tessera::report {

double MetricRows::value(const Row& row, const std::string& column) const {
  const auto found = columns_.find(column);
  return found == columns_.end() || found->second >= row.values.size() ? kMissing : row.values[found->second];
}

void MetricRows::put(int64_t step, const std::map<std::string, double>& values) {
  for (const auto& [name, number] : values) columns_.emplace(name, columns_.size());
  Row row;
  row.values.resize(columns_.size(), kMissing);
  for (const auto& [name, number] : values) row.values[columns_.at(name)] = number;
  const auto [place, fresh] = rows_.insert_or_assign(step, std::move(row));
  step_count_ += fresh ? 1 : 0;
  if (rows_.size() > options_.max_rows) thin_out();
}

// Drops rows until at most half of options_.max_rows are left, so that rows are dropped only once per options_.max_rows
// / 2 steps. A z-score depends on the rows before its row, so the z-scores of all rows are stored in the rows before
// any row is dropped. Afterwards scores() computes only the z-scores of rows that were added later; it continues from
// the detectors losses_ and grad_norms_.
void MetricRows::thin_out() {
  for (auto row = rows_.upper_bound(last_scored_step_); row != rows_.end(); ++row) {
    if (columns_.contains(options_.loss)) row->second.loss_z = losses_.add(value(row->second, options_.loss));
    if (columns_.contains("grad_norm")) row->second.grad_norm_z = grad_norms_.add(value(row->second, "grad_norm"));
    last_scored_step_ = row->first;
  }
  // Returns the row's value in a column, or infinity if the value is not finite. thin_out() keeps the row with the
  // largest value of each range of steps, so it keeps the first row of the range whose value is not finite.
  const auto value_or_infinity = [&](const Row& row, const char* column) {
    const double found = value(row, column);
    return std::isfinite(found) ? found : std::numeric_limits<double>::infinity();
  };
  // The length of the ranges, steps_per_range_, is doubled until at most half of max_rows are kept. A range begins at a
  // multiple of its length, so it consists of whole ranges of the previous length. Its extremes are therefore among the
  // rows that an earlier call kept.
  for (;; steps_per_range_ *= 2) {
    std::set<int64_t> kept = {rows_.begin()->first, rows_.rbegin()->first};
    for (auto row = rows_.begin(); row != rows_.end();) {
      const int64_t number = row->first / steps_per_range_;
      auto least = row, largest = row, largest_norm = row;
      for (; row != rows_.end() && row->first / steps_per_range_ == number; ++row) {
        const double loss = value_or_infinity(row->second, options_.loss.c_str());
        if (loss < value_or_infinity(least->second, options_.loss.c_str())) least = row;
        if (loss > value_or_infinity(largest->second, options_.loss.c_str())) largest = row;
        if (value_or_infinity(row->second, "grad_norm") > value_or_infinity(largest_norm->second, "grad_norm")) {
          largest_norm = row;
        }
      }
      kept.insert({least->first, largest->first, largest_norm->first});
    }
    std::erase_if(rows_, [&](const auto& row) { return !kept.contains(row.first); });
    if (rows_.size() <= options_.max_rows / 2) return;
  }
}

MetricSeries MetricRows::series() const {
  MetricSeries out;
  out.step.reserve(rows_.size());
  for (const auto& [step, row] : rows_) out.step.push_back(step);
  for (const auto& [name, at] : columns_) {
    auto& column = out.columns[name];
    column.reserve(rows_.size());
    for (const auto& [step, row] : rows_) column.push_back(at < row.values.size() ? row.values[at] : kMissing);
  }
  return out;
}

std::vector<double> MetricRows::scores(const std::string& column, const train::OutlierDetector& seen,
                                       double Row::*kept) const {
  std::vector<double> out;
  if (!columns_.contains(column)) return out;
  auto detector = seen;
  for (const auto& [step, row] : rows_) {
    out.push_back(step <= last_scored_step_ ? row.*kept : detector.add(value(row, column)));
  }
  return out;
}

std::vector<double> MetricRows::loss_scores() const { return scores(options_.loss, losses_, &Row::loss_z); }
std::vector<double> MetricRows::grad_norm_scores() const { return scores("grad_norm", grad_norms_, &Row::grad_norm_z); }

}  // namespace tessera::report
