// Rounding that keeps what is too small for a dtype on average.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <string_view>

namespace at {
class Tensor;
}

namespace tessera::optim::detail {

// Writes the float32 `values` into `into`, bfloat16 and of their shape: each becomes one of its two neighbours, the
// nearer the likelier, so that the mean is the value. The choice depends on seed, name, step and the element's place
// in the global tensor. `parameter`: the tensor whose part `into` is, a DTensor or itself. NaN and infinity stay. No
// communication.
void round_stochastically(const at::Tensor& into, const at::Tensor& values, const at::Tensor& parameter, uint64_t seed,
                          std::string_view name, int64_t step);

}  // namespace tessera::optim::detail
