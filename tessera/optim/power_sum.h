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

// The larger of two numbers; NaN if one is NaN.
inline double larger(double a, double b) { return a >= b || a != a ? a : b; }

// The sum of |x / divisor|^p, or for infinite p the largest |x|.
struct PowerSum {
  double p = 2;
  double divisor = 1;

  bool infinite() const { return std::isinf(p); }
  double term(double x) const { return infinite() ? std::fabs(x) : std::pow(std::fabs(x / divisor), p); }
  double add(double a, double b) const { return infinite() ? larger(a, b) : a + b; }
  // Returns the sum over all elements of all tensors; 0 without elements. Tensors are plain and floating-point, on any
  // devices. The result does not depend on the number of threads. The host waits once per device.
  double of(const std::vector<at::Tensor>& tensors) const;
};

// Computes the norm from the sum of powers sum_of(PowerSum). If the sum overflows or loses digits, it is computed again
// relative to the largest value. sum_of must return the sum over all ranks, the same on every rank, so that all ranks
// decide alike whether they call it again.
template <class SumOf>
double norm_of_sums(double norm_type, const SumOf& sum_of) {
  const PowerSum largest{.p = std::numeric_limits<double>::infinity()};
  if (std::isinf(norm_type)) return sum_of(largest);
  const double sum = sum_of(PowerSum{.p = norm_type});
  // In a sum below kSmall, terms may have lost digits or become 0.
  constexpr double kSmall = std::numeric_limits<double>::min() / std::numeric_limits<double>::epsilon();
  if (std::isnan(sum) || (sum >= kSmall && !std::isinf(sum))) return std::pow(sum, 1 / norm_type);
  const double maximum = sum_of(largest);
  if (!std::isfinite(maximum) || maximum == 0) return maximum;
  return maximum * std::pow(sum_of(PowerSum{.p = norm_type, .divisor = maximum}), 1 / norm_type);
}

}  // namespace tessera::optim
