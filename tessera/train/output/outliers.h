// Tells values that stand out from the ones before them.
//
//   OutlierDetector losses;
//   double z = losses.add(loss);      // standard deviations above the mean of the last 128; NaN while there are few
//
// What llm.c prints beside loss and gradient norm (its outlier detector), from a few values on. Not thread-safe.
#pragma once

#include <cstddef>
#include <vector>

namespace tessera::train {

class OutlierDetector {
 public:
  explicit OutlierDetector(size_t window = 128, size_t at_least = 16) : window_(window), at_least_(at_least) {}

  // The z-score of `value` among the window before it; then value joins the window, unless it is not finite. NaN with
  // fewer than `at_least` values before, infinite for a value that is not finite or leaves a constant window.
  double add(double value);

 private:
  size_t window_;
  size_t at_least_;
  size_t next_ = 0;  // slot of the oldest value once the window is full
  std::vector<double> values_;
};

// A z-score that deserves a look.
inline constexpr double kOutlierZ = 4.0;

}  // namespace tessera::train
