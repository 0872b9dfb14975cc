#include "tessera/kernels/linear/dynamic_map.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"

namespace tessera::kernels {

// The map has values in seven decades, from 1e-7 to 1, and each decade has twice as many values as the one before. The
// values are computed with torchao's operations in torchao's order, so that they are rounded as torchao's are.
at::Tensor dynamic_map(bool is_signed) {
  constexpr int kExponents = 7;
  std::vector<double> values = {0, 1};
  for (int i = 0; i < kExponents; ++i) {
    const int64_t fractions = (int64_t{1} << (is_signed ? i : i + 1)) + 1;
    const auto boundaries = at::linspace(0.1, 1, fractions, at::kFloat);
    const auto means = (boundaries.slice(0, 0, fractions - 1) + boundaries.slice(0, 1)).div(2.0);
    const auto scaled = means.mul(std::pow(10.0, i - (kExponents - 1)));
    for (int64_t each = 0; each + 1 < fractions; ++each) {
      const double value = scaled[each].item<double>();
      values.push_back(value);
      if (is_signed) values.push_back(-value);
    }
  }
  std::ranges::sort(values);
  TESSERA_CHECK(values.size() == 256, ErrorKind::kInternal, "[kernels.dynamic_map] found {} values, wanted 256",
                values.size());
  return at::tensor(values, at::kFloat);
}

uint8_t nearest_in_map(const float* map, float value) {
  const auto above = std::upper_bound(map, map + 256, value) - map;
  const auto down = std::max<std::ptrdiff_t>(above - 1, 0), up = std::min<std::ptrdiff_t>(down + 1, 255);
  return static_cast<uint8_t>(value - map[down] >= (map[up] - map[down]) * 0.5F ? up : down);
}

}  // namespace tessera::kernels
