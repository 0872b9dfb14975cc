// Sums of |x|^p over many tensors in one pass, in float64.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cmath>
#include <vector>

namespace at {
class Tensor;
}

namespace tessera::optim::detail {

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

}  // namespace tessera::optim::detail
