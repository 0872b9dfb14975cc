// Sums of |x|^p over many tensors in one pass, in float64.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cmath>
#include <limits>
#include <vector>

namespace at {
class Tensor;
}

namespace tessera::optim {

// The larger one; a NaN stays.
inline double larger(double a, double b) { return a >= b || a != a ? a : b; }

// |x / divisor|^p added up, or for infinite p the largest |x|.
struct PowerSum {
  double p = 2;
  double divisor = 1;

  bool infinite() const { return std::isinf(p); }
  double term(double x) const { return infinite() ? std::fabs(x) : std::pow(std::fabs(x / divisor), p); }
  double add(double a, double b) const { return infinite() ? larger(a, b) : a + b; }
  // Over all elements of all tensors, floating and plain, of any dtypes and devices; 0 of none. The number of threads
  // does not show in the result. One wait a device.
  double of(const std::vector<at::Tensor>& tensors) const;
};

// The norm as a sum of powers that may have to be taken again over the largest value: `sum_of` gives the sum over all
// ranks, alike on all of them.
template <class SumOf>
double norm_of_sums(double norm_type, const SumOf& sum_of) {
  const PowerSum largest{.p = std::numeric_limits<double>::infinity()};
  if (std::isinf(norm_type)) return sum_of(largest);
  const double sum = sum_of(PowerSum{.p = norm_type});
  // Below this, terms may have lost digits or vanished.
  constexpr double kSmall = std::numeric_limits<double>::min() / std::numeric_limits<double>::epsilon();
  if (std::isnan(sum) || (sum >= kSmall && !std::isinf(sum))) return std::pow(sum, 1 / norm_type);
  const double most = sum_of(largest);
  if (!std::isfinite(most) || most == 0) return most;
  return most * std::pow(sum_of(PowerSum{.p = norm_type, .divisor = most}), 1 / norm_type);
}

}  // namespace tessera::optim
