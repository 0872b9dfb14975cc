// The parameters of the parts of a model, each once, with the marks of their modules (nn::GradientMarks).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/gradient_marks.h"
#include "tessera/nn/module.h"

namespace tessera::optim::detail {

struct ModelParameter {
  std::string name;  // FQN in its part
  at::Tensor tensor;
  bool local_expert = false;              // marked, or named as an expert of Transformer Engine
  std::optional<double> owner_divisor{};  // the divisor of its module's marks
};

// In the order of parts and parameters. Error kConfig: a divisor of 0, or two divisors for one parameter.
std::vector<ModelParameter> model_parameters(const std::vector<nn::Module*>& parts);

}  // namespace tessera::optim::detail
