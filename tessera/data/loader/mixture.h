// The order in which samples are drawn from the data sets of a mixture.
//
//   Mixture mixture({3, 1});
//   Mixture::DrawnSample draw = mixture.at(7);       // the source (0 or 1), and its number of earlier draws
//
// Row g of the run comes from the source that is furthest behind its share: the source with the largest value of
// weight * (g + 1) - (number of rows drawn from the source so far); of several such sources, the first one. Weights are
// divided by their sum. At any time, a source is less than one row ahead of its share, and behind it by less than one
// row for each other source. The order depends on the weights alone. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::data {

class Mixture {
 public:
  struct DrawnSample {
    size_t source = 0;
    int64_t index = 0;  // number of earlier draws from this source
  };

  // Weights above 0. Their sum need not be 1.
  explicit Mixture(std::vector<double> weights);
  // Queries in ascending order cost O(sources) for each sample. A query of a sample before the last queried one replays
  // all draws from sample 0.
  DrawnSample at(int64_t sample);

 private:
  std::vector<double> shares_;
  std::vector<int64_t> drawn_;
  int64_t next_ = 0;
  DrawnSample last_;
};

}  // namespace tessera::data
