// Lists the parameters of all model parts (the pipeline stages on this rank), each once, with the marks of its modules
// (nn::GradientMarks).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/gradient_marks.h"
#include "tessera/nn/module.h"

namespace tessera::optim::detail {

struct ModelParameter {
  std::string name;  // FQN in its model part
  at::Tensor tensor;
  bool local_expert = false;              // marked ep_local_experts, or named as a Transformer Engine expert
  std::optional<double> owner_divisor{};  // from its module's GradientMarks::grad_divisors
};

// Returns the parameters of all model parts: those of the first part, then those of the second, and so on, each part in
// the order of named_parameters(). Error kConfig when GradientMarks::grad_divisors has a divisor of 0, or when two
// modules that share a parameter have different divisors for it.
std::vector<ModelParameter> model_parameters(const std::vector<nn::Module*>& parts);

}  // namespace tessera::optim::detail
