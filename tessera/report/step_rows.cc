#include "tessera/report/step_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

namespace tessera::report {

double StepRows::value(const Row& row, const std::string& column) const {
  const auto found = columns_.find(column);
  return found == columns_.end() || found->second >= row.values.size() ? kNothing : row.values[found->second];
}

void StepRows::put(int64_t step, const std::map<std::string, double>& values) {
  for (const auto& [name, number] : values) columns_.emplace(name, columns_.size());
  Row row;
  row.values.resize(columns_.size(), kNothing);
  for (const auto& [name, number] : values) row.values[columns_.at(name)] = number;
  const auto [place, fresh] = rows_.insert_or_assign(step, std::move(row));
  told_ += fresh ? 1 : 0;
  if (rows_.size() > options_.most) thin_out();
}

// Drops rows until at most half of options_.most are left, so that this happens only once per options_.most / 2 steps.
// A z-score depends on the rows before it. So the scores of all rows are computed and stored first; scores() computes
// only those of later rows, from the detectors as they are here.
void StepRows::thin_out() {
  for (auto row = rows_.upper_bound(settled_); row != rows_.end(); ++row) {
    if (columns_.contains(options_.loss)) row->second.loss_z = losses_.add(value(row->second, options_.loss));
    if (columns_.contains("grad_norm")) row->second.grad_norm_z = grad_norms_.add(value(row->second, "grad_norm"));
    settled_ = row->first;
  }
  // The value of a column; a value that is not finite counts as the largest, so that its row is kept.
  const auto height = [&](const Row& row, const char* column) {
    const double found = value(row, column);
    return std::isfinite(found) ? found : std::numeric_limits<double>::infinity();
  };
  // The ranges double in length until few enough rows are left. Ranges begin at multiples of stretch_, so a longer
  // range consists of whole shorter ones, and rows that were kept before remain the extremes.
  for (;; stretch_ *= 2) {
    std::set<int64_t> kept = {rows_.begin()->first, rows_.rbegin()->first};
    for (auto row = rows_.begin(); row != rows_.end();) {
      const int64_t number = row->first / stretch_;
      auto least = row, largest = row, steepest = row;
      for (; row != rows_.end() && row->first / stretch_ == number; ++row) {
        const double loss = height(row->second, options_.loss.c_str());
        if (loss < height(least->second, options_.loss.c_str())) least = row;
        if (loss > height(largest->second, options_.loss.c_str())) largest = row;
        if (height(row->second, "grad_norm") > height(steepest->second, "grad_norm")) steepest = row;
      }
      kept.insert({least->first, largest->first, steepest->first});
    }
    std::erase_if(rows_, [&](const auto& row) { return !kept.contains(row.first); });
    if (rows_.size() <= options_.most / 2) return;
  }
}

Series StepRows::series() const {
  Series out;
  out.step.reserve(rows_.size());
  for (const auto& [step, row] : rows_) out.step.push_back(step);
  for (const auto& [name, at] : columns_) {
    auto& column = out.columns[name];
    column.reserve(rows_.size());
    for (const auto& [step, row] : rows_) column.push_back(at < row.values.size() ? row.values[at] : kNothing);
  }
  return out;
}

std::vector<double> StepRows::scores(const std::string& column, const train::OutlierDetector& seen,
                                     double Row::*kept) const {
  std::vector<double> out;
  if (!columns_.contains(column)) return out;
  auto detector = seen;
  for (const auto& [step, row] : rows_) out.push_back(step <= settled_ ? row.*kept : detector.add(value(row, column)));
  return out;
}

std::vector<double> StepRows::loss_scores() const { return scores(options_.loss, losses_, &Row::loss_z); }
std::vector<double> StepRows::grad_norm_scores() const { return scores("grad_norm", grad_norms_, &Row::grad_norm_z); }

}  // namespace tessera::report
