#include "tessera/models/tensors/packed_parts.h"

#include <ATen/ops/empty.h>

#include "tessera/nn/linear/quantized_linear.h"

namespace tessera {

std::vector<SharedParameter> parameters_and_packed(nn::Module& module) {
  auto all = shared_parameters(module);
  const auto dtype = all.empty() ? at::kFloat : all.front().tensor.scalar_type();
  for (const auto& [name, packed] : nn::packed_weights(module)) {
    const auto form = at::empty({packed->out, packed->in}, at::TensorOptions(dtype).device(at::kMeta));
    all.push_back({form, {name}, {}});
  }
  return all;
}

}  // namespace tessera
