// The elements of a parameter that a rank holds.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/dtensor/random/random_fill.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::optim::detail {

// Returns which elements of `parameter`, a DTensor or a plain tensor, this rank holds. No communication.
inline tessera::ShardRegion region_of(const at::Tensor& parameter) {
  if (!is_dtensor(parameter)) return tessera::ShardRegion(parameter.sizes());
  return {parameter.sizes(), *device_mesh(parameter), placements(parameter)};
}

}  // namespace tessera::optim::detail
