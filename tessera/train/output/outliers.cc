#include "tessera/train/output/outliers.h"

#include <cmath>
#include <limits>

namespace tessera::train {

// `values_` is a ring buffer: next_ is its oldest entry once it is full. Values that are not finite are outliers by
// definition and are not stored, because mean and deviation could not be computed with them.
double OutlierDetector::add(double value) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double z = std::numeric_limits<double>::quiet_NaN();
  if (!std::isfinite(value)) return std::signbit(value) && !std::isnan(value) ? -kInfinity : kInfinity;
  if (values_.size() >= min_values_ && !values_.empty()) {
    // Welford's algorithm over the whole window each time. Rolling sums would lose digits over a long run.
    double mean = 0, squares = 0, count = 0;
    for (const double old : values_) {
      const double delta = old - mean;
      mean += delta / ++count;
      squares += delta * (old - mean);
    }
    const double deviation = std::sqrt(squares / count);
    const double distance = value - mean;
    z = deviation > 0 ? distance / deviation : distance == 0 ? 0 : std::copysign(kInfinity, distance);
  }
  if (values_.size() < window_) {
    values_.push_back(value);
  } else if (window_ > 0) {
    values_[next_] = value;
    next_ = (next_ + 1) % window_;
  }
  return z;
}

}  // namespace tessera::train
