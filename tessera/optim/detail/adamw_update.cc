#include "tessera/optim/detail/adamw_update.h"

#include "tessera/base/error.h"

namespace tessera::optim::detail {

Hyperparameters adamw_settings(const AdamWOptions& options) {
  return {{"betas", std::vector<double>{options.beta1, options.beta2}},
          {"eps", options.eps},
          {"weight_decay", options.weight_decay},
          {"amsgrad", false},
          {"maximize", false},
          {"foreach", std::monostate()},
          {"capturable", false},
          {"differentiable", false},
          {"fused", std::monostate()},
          {"decoupled_weight_decay", true}};
}

void check_adamw(const Hyperparameters& settings, const char* verb) {
  const auto is_decay_rate = [](double beta) { return beta >= 0 && beta < 1; };
  const auto [beta1, beta2] = pair_of(settings, "betas");
  const double eps = number_of(settings, "eps");
  TESSERA_CHECK(is_decay_rate(beta1) && is_decay_rate(beta2) && eps >= 0, ErrorKind::kConfig,
                "[optim.{}] found betas ({}, {}) and eps {}, wanted betas in [0, 1) and eps of at least 0", verb, beta1,
                beta2, eps);
  TESSERA_CHECK(
      !flag_of(settings, "amsgrad") && !flag_of(settings, "maximize") && flag_of(settings, "decoupled_weight_decay"),
      ErrorKind::kConfig,
      "[optim.{}] found amsgrad {}, maximize {} and decoupled_weight_decay {}, wanted false, false and true: "
      "this AdamW has no other forms. Continue with the optimizer that wrote these settings, or change them.",
      verb, flag_of(settings, "amsgrad"), flag_of(settings, "maximize"), flag_of(settings, "decoupled_weight_decay"));
}

const std::vector<std::string>& adamw_states() {
  static const std::vector<std::string> kStates = {"exp_avg", "exp_avg_sq"};
  return kStates;
}

}  // namespace tessera::optim::detail
