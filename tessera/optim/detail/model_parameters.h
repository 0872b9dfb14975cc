// The parameters of the parts of a model, each once, with what the modules say of their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/gradient_marks.h"
#include "tessera/nn/module.h"

namespace tessera::optim::detail {

struct ModelParameter {
  std::string name;  // in its part
  at::Tensor tensor;
  bool local_expert = false;              // marked, or named as Transformer Engine's experts are
  std::optional<double> owner_divisor{};  // the module's own
};

// In the order of parts and parameters. Error kConfig: parts that give one parameter two divisors.
std::vector<ModelParameter> model_parameters(const std::vector<nn::Module*>& parts);

}  // namespace tessera::optim::detail
