#include "tessera/data/loader/mixture.h"

#include <algorithm>
#include <numeric>

namespace tessera::data {

Mixture::Mixture(std::vector<double> weights) : shares_(std::move(weights)), drawn_(shares_.size(), 0) {
  const double sum = std::accumulate(shares_.begin(), shares_.end(), 0.0);
  for (double& share : shares_) share /= sum;
}

// Makes the draws from the one after the last queried sample to `sample`, so queries in ascending order are cheap. A
// query of an earlier sample makes all draws again from sample 0. last_ is the draw of the last queried sample: it is
// returned when the same sample is queried again, because drawn_ already counts it.
Mixture::DrawnSample Mixture::at(int64_t sample) {
  if (sample + 1 < next_) {
    next_ = 0;
    std::ranges::fill(drawn_, 0);
  }
  for (; next_ <= sample; ++next_) {
    size_t chosen = 0;
    double largest_lag = 0;
    for (size_t i = 0; i < shares_.size(); ++i) {
      const double lag = shares_[i] * static_cast<double>(next_ + 1) - static_cast<double>(drawn_[i]);
      if (i == 0 || lag > largest_lag) chosen = i, largest_lag = lag;
    }
    last_ = {chosen, drawn_[chosen]++};
  }
  return last_;
}

}  // namespace tessera::data
