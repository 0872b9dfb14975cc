// What all optimizers that hold AdamW share: its settings, their checks, its update.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"

namespace tessera::optim::detail {

// In the order of torch.optim.AdamW's groups.
Hyperparameters adamw_settings(const AdamWOptions& options);
// Error kConfig for what update_adamw cannot do, named with `verb`.
void check_adamw(const Hyperparameters& settings, const char* verb);
const std::vector<std::string>& adamw_states();

// One entry a parameter; steps count this one already.
struct AdamWTensors {
  std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
};
void update_adamw(AdamWTensors& tensors, double lr, const Hyperparameters& settings);

}  // namespace tessera::optim::detail
