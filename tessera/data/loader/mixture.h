// The order in which a mixture of data sets is drawn from.
//
//   Mixture mixture({3, 1});
//   Mixture::Draw draw = mixture.at(7);       // source 0 or 1, and how many of its rows came before
//
// Row g of the run is of the source that is furthest behind its share: the one with the largest weight * (g + 1) - rows
// drawn so far, the first of equals. After any number of rows each source has had its share to within one row per
// source. The order is a function of the weights alone. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace tessera::data {

class Mixture {
 public:
  struct Draw {
    size_t source = 0;
    int64_t index = 0;  // of this source's draws
  };

  // Weights above 0; they need no sum of 1.
  explicit Mixture(std::vector<double> weights);
  // Rising samples cost O(sources) each; one before the last starts again from 0.
  Draw at(int64_t sample);

 private:
  std::vector<double> shares_;
  std::vector<int64_t> drawn_;
  int64_t next_ = 0;
  Draw last_;
};

}  // namespace tessera::data
