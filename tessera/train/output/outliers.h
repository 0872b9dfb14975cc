// Detects values that differ much from the values before them.
//
//   OutlierDetector losses;
//   double z = losses.add(loss);      // deviations from the mean of the last 128 values; NaN for the first 16
//
// Corresponds to the outlier detector of llm.c, which prints z-scores of loss and gradient norm. OutlierDetector
// gives z-scores after `min_values` values; llm.c waits for a full window. Not thread-safe.
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::train {

class OutlierDetector {
 public:
  explicit OutlierDetector(size_t window = 128, size_t min_values = 16) : window_(window), min_values_(min_values) {}

  // Returns the z-score of `value` in the window of values before it, and adds `value` to the window if it is finite.
  // The result is NaN with fewer than `min_values` values in the window. It is infinite for a value that is not finite,
  // and for a value that differs from a window of equal values.
  double add(double value);

 private:
  size_t window_;
  size_t min_values_;
  size_t next_ = 0;  // slot of the oldest value once the window is full
  std::vector<double> values_;
};

// Values whose absolute z-score is at least kOutlierZ are marked as outliers in the output.
inline constexpr double kOutlierZ = 4.0;

}  // namespace tessera::train
