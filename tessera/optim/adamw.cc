#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

class AdamW : public Optimizer {
 public:
  AdamW(nn::Module& module, const AdamWOptions& options)
      : Optimizer(module, options.lr, options.weight_decay, options.groups, {"exp_avg", "exp_avg_sq"},
                  {options.master_weights, options.stochastic_rounding, options.seed}),
        beta1_(options.beta1),
        beta2_(options.beta2),
        eps_(options.eps) {
    const auto is_decay_rate = [](double beta) { return beta >= 0 && beta < 1; };
    TESSERA_CHECK(is_decay_rate(beta1_) && is_decay_rate(beta2_) && eps_ >= 0, ErrorKind::kConfig,
                  "[optim.make_adamw] found betas ({}, {}) and eps {}, wanted betas in [0, 1) and eps of at least 0",
                  beta1_, beta2_, eps_);
  }

 private:
  void apply(const std::vector<Update>& updates, double lr, double weight_decay) override {
    std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
    for (const auto& [entry, value, gradient] : updates) {
      parameters.push_back(value);
      gradients.push_back(gradient);
      averages.push_back(entry->state.at("exp_avg"));
      squares.push_back(entry->state.at("exp_avg_sq"));
      steps.push_back(entry->step);
    }
    at::_fused_adamw_(parameters, gradients, averages, squares, {}, steps, lr, beta1_, beta2_, weight_decay, eps_,
                      /*amsgrad=*/false, /*maximize=*/false);
  }

  double beta1_;
  double beta2_;
  double eps_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(nn::Module& module, const AdamWOptions& options) {
  return std::make_unique<AdamW>(module, options);
}

}  // namespace tessera::optim
