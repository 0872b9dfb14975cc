// Stochastic rounding to bfloat16: an update that is smaller than the dtype's precision is kept on average.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <string_view>

namespace at {
class Tensor;
}

namespace tessera::optim::detail {

// Writes the float32 `values` into `into`, a bfloat16 tensor of the same shape. Each value becomes one of its two
// neighbours in bfloat16, the nearer one with the higher probability, so that the expected result is the value. The
// random choice depends on seed, name, step and the element's global index. `parameter`: the DTensor whose local part
// `into` is, or `into` itself. NaN and infinity are kept. No communication.
void round_stochastically(const at::Tensor& into, const at::Tensor& values, const at::Tensor& parameter, uint64_t seed,
                          std::string_view name, int64_t step);

}  // namespace tessera::optim::detail
