#include <ATen/core/Tensor.h>

#include "tessera/base/error.h"
#include "tessera/optim/detail/hyperparameters.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

using detail::flag_of;
using detail::number_of;

class Sgd : public Optimizer {
 public:
  Sgd(nn::Module& module, const SgdOptions& options, const Hyperparameters& settings)
      : Optimizer(module, options.lr, {settings}, options.groups,
                  {options.master_weights, options.stochastic_rounding, options.seed}, {}) {
    set_up_groups("make_sgd");
  }

 private:
  void apply(const std::vector<Update>& updates, const Group& group) override {
    const double weight_decay = number_of(group.settings, "weight_decay");
    const double momentum = number_of(group.settings, "momentum");
    const double dampening = number_of(group.settings, "dampening");
    const bool nesterov = flag_of(group.settings, "nesterov");
    for (const auto& [entry, value, gradient] : updates) {
      at::Tensor direction = weight_decay == 0 ? gradient : gradient.add(value, weight_decay);
      if (momentum > 0) {
        at::Tensor& buffer = entry->state.at("momentum_buffer");
        // The first step takes the gradient as it is, without dampening.
        const bool first = dampening != 0 && entry->step.item<float>() == 1;
        buffer.mul_(momentum).add_(direction, first ? 1.0 : 1.0 - dampening);
        direction = nesterov ? direction.add(buffer, momentum) : buffer;
      }
      value.add_(direction, -group.lr);
    }
  }

  void check(const Hyperparameters& settings, const char* verb) const override {
    const double momentum = number_of(settings, "momentum"), dampening = number_of(settings, "dampening");
    TESSERA_CHECK(momentum >= 0, ErrorKind::kConfig, "[optim.{}] found momentum {}, wanted at least 0", verb, momentum);
    TESSERA_CHECK(!flag_of(settings, "nesterov") || (momentum > 0 && dampening == 0), ErrorKind::kConfig,
                  "[optim.{}] nesterov wants momentum above 0 and no dampening, found {} and {}", verb, momentum,
                  dampening);
    TESSERA_CHECK(!flag_of(settings, "maximize"), ErrorKind::kConfig,
                  "[optim.{}] SGD here does not maximize. Negate the loss.", verb);
  }

  std::vector<std::string> state_names(const Hyperparameters& settings) const override {
    return number_of(settings, "momentum") > 0 ? std::vector<std::string>{"momentum_buffer"}
                                               : std::vector<std::string>{};
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(nn::Module& module, const SgdOptions& options) {
  return std::make_unique<Sgd>(module, options,
                               Hyperparameters{{"momentum", options.momentum},
                                               {"dampening", options.dampening},
                                               {"weight_decay", options.weight_decay},
                                               {"nesterov", options.nesterov},
                                               {"maximize", false},
                                               {"foreach", std::monostate()},
                                               {"differentiable", false},
                                               {"fused", std::monostate()}});
}

}  // namespace tessera::optim
