// The AdamW settings, checks and update that several optimizers share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/optim/detail/hyperparameters.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim::detail {

// Returns the settings of a parameter group without lr, in the order of torch.optim.AdamW's param_groups.
Hyperparameters adamw_settings(const AdamWOptions& options);
// Error kConfig for settings that apply_adamw does not support; `verb` names the caller in the message.
void check_adamw(const Hyperparameters& settings, const char* verb);
const std::vector<std::string>& adamw_states();

// Applies `updates` with one fused AdamW kernel. Their entries must hold the states exp_avg and exp_avg_sq and a step
// count that includes this update. found_inf: undefined, or a float32 scalar on the parameters' device; where it is 1,
// parameters and states stay unchanged.
template <class Update>
void apply_adamw(const std::vector<Update>& updates, double lr, const Hyperparameters& settings,
                 const at::Tensor& found_inf = {}) {
  std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
  for (const auto& [entry, value, gradient] : updates) {
    parameters.push_back(value);
    gradients.push_back(gradient);
    averages.push_back(entry->state.at("exp_avg"));
    squares.push_back(entry->state.at("exp_avg_sq"));
    steps.push_back(entry->step);
  }
  const auto [beta1, beta2] = pair_of(settings, "betas");
  at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, lr, beta1, beta2,
                    number_of(settings, "weight_decay"), number_of(settings, "eps"), /*amsgrad=*/false,
                    /*maximize=*/false, /*grad_scale=*/{},
                    found_inf.defined() ? std::optional(found_inf) : std::nullopt);
}

}  // namespace tessera::optim::detail
