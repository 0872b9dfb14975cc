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
// found_inf, where it is defined: a float32 scalar beside them; where it is 1, nothing changes.
void update_adamw(AdamWTensors& tensors, double lr, const Hyperparameters& settings, const at::Tensor& found_inf = {});
// Of an optimizer's updates, whose entries hold the states of adamw_states().
template <class Update>
void apply_adamw(const std::vector<Update>& updates, double lr, const Hyperparameters& settings,
                 const at::Tensor& found_inf = {}) {
  AdamWTensors tensors;
  for (const auto& [entry, value, gradient] : updates) {
    tensors.parameters.push_back(value);
    tensors.gradients.push_back(gradient);
    tensors.averages.push_back(entry->state.at("exp_avg"));
    tensors.squares.push_back(entry->state.at("exp_avg_sq"));
    tensors.steps.push_back(entry->step);
  }
  update_adamw(tensors, lr, settings, found_inf);
}

}  // namespace tessera::optim::detail
