#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>

#include "tessera/base/error.h"
#include "tessera/optim/detail/hyperparameters.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

using detail::flag_of;
using detail::number_of;
using detail::pair_of;

const std::vector<std::string> kAdamWStates = {"exp_avg", "exp_avg_sq"};

class AdamW : public Optimizer {
 public:
  AdamW(nn::Module& module, const AdamWOptions& options, const Hyperparameters& settings)
      : Optimizer(module, options.lr, settings, options.groups, kAdamWStates,
                  {options.master_weights, options.stochastic_rounding, options.seed}) {
    check(settings, "make_adamw");
  }

 private:
  void apply(const std::vector<Update>& updates, const Group& group) override {
    std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
    for (const auto& [entry, value, gradient] : updates) {
      parameters.push_back(value);
      gradients.push_back(gradient);
      averages.push_back(entry->state.at("exp_avg"));
      squares.push_back(entry->state.at("exp_avg_sq"));
      steps.push_back(entry->step);
    }
    const auto [beta1, beta2] = pair_of(group.settings, "betas");
    at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, group.lr, beta1, beta2,
                      number_of(group.settings, "weight_decay"), number_of(group.settings, "eps"),
                      /*amsgrad=*/false, /*maximize=*/false);
  }

  void check(const Hyperparameters& settings, const char* verb) const override {
    const auto is_decay_rate = [](double beta) { return beta >= 0 && beta < 1; };
    const auto [beta1, beta2] = pair_of(settings, "betas");
    const double eps = number_of(settings, "eps");
    TESSERA_CHECK(is_decay_rate(beta1) && is_decay_rate(beta2) && eps >= 0, ErrorKind::kConfig,
                  "[optim.{}] found betas ({}, {}) and eps {}, wanted betas in [0, 1) and eps of at least 0", verb,
                  beta1, beta2, eps);
    TESSERA_CHECK(
        !flag_of(settings, "amsgrad") && !flag_of(settings, "maximize") && flag_of(settings, "decoupled_weight_decay"),
        ErrorKind::kConfig,
        "[optim.{}] AdamW here has neither amsgrad nor maximize, and its weight decay is decoupled; found amsgrad {}, "
        "maximize {}, decoupled_weight_decay {}. Train on with what wrote them, or set them so.",
        verb, flag_of(settings, "amsgrad"), flag_of(settings, "maximize"), flag_of(settings, "decoupled_weight_decay"));
  }

  std::vector<std::string> state_names(const Hyperparameters&) const override { return kAdamWStates; }
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(nn::Module& module, const AdamWOptions& options) {
  return std::make_unique<AdamW>(module, options,
                                 Hyperparameters{{"betas", std::vector<double>{options.beta1, options.beta2}},
                                                 {"eps", options.eps},
                                                 {"weight_decay", options.weight_decay},
                                                 {"amsgrad", false},
                                                 {"maximize", false},
                                                 {"foreach", std::monostate()},
                                                 {"capturable", false},
                                                 {"differentiable", false},
                                                 {"fused", std::monostate()},
                                                 {"decoupled_weight_decay", true}});
}

}  // namespace tessera::optim
