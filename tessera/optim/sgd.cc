#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/optim/detail/chunks.h"
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
  void apply(const std::vector<ParameterUpdate>& updates, const SettingsGroup& group) override {
    detail::for_each_chunk(
        updates, [](const ParameterUpdate& update) { return update.value.numel(); },
        [&](const std::vector<ParameterUpdate>& chunk) { apply_chunk(chunk, group); });
  }

  // The update: d = gradient + weight_decay * value; buffer = momentum * buffer + (1 - dampening) * d; then value -= lr
  // * buffer, or with Nesterov value -= lr * (d + momentum * buffer). The foreach operations process all parameters of
  // a chunk at once.
  static void apply_chunk(const std::vector<ParameterUpdate>& updates, const SettingsGroup& group) {
    const double weight_decay = number_of(group.settings, "weight_decay");
    const double momentum = number_of(group.settings, "momentum");
    std::vector<at::Tensor> values, directions;
    for (const auto& update : updates) {
      values.push_back(update.value);
      directions.push_back(update.gradient);
    }
    if (weight_decay != 0) directions = at::_foreach_add(directions, values, weight_decay);
    if (momentum > 0) {
      const auto buffers = with_momentum(updates, directions, momentum, number_of(group.settings, "dampening"));
      directions = flag_of(group.settings, "nesterov") ? at::_foreach_add(directions, buffers, momentum) : buffers;
    }
    at::_foreach_add_(values, directions, -group.lr);
  }

  // Multiplies the momentum buffers by momentum, adds the directions (gradients plus weight decay) and returns the
  // buffers. After the first step the directions are multiplied by 1 - dampening before they are added.
  static std::vector<at::Tensor> with_momentum(const std::vector<ParameterUpdate>& updates,
                                               const std::vector<at::Tensor>& directions, double momentum,
                                               double dampening) {
    std::vector<at::Tensor> buffers;
    std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> undampened, dampened;
    for (size_t i = 0; i < updates.size(); ++i) {
      const auto& buffer = buffers.emplace_back(updates[i].entry->state.at("momentum_buffer"));
      // The first step ignores dampening, as in torch.optim.SGD: the buffer starts as the gradient.
      auto& [into, from] = dampening != 0 && steps_of(*updates[i].entry) > 1 ? dampened : undampened;
      into.push_back(buffer);
      from.push_back(directions[i]);
    }
    at::_foreach_mul_(buffers, momentum);
    if (!undampened.first.empty()) at::_foreach_add_(undampened.first, undampened.second, 1);
    if (!dampened.first.empty()) at::_foreach_add_(dampened.first, dampened.second, 1 - dampening);
    return buffers;
  }

  void check(const Hyperparameters& settings, const char* verb) const override {
    const double momentum = number_of(settings, "momentum"), dampening = number_of(settings, "dampening");
    TESSERA_CHECK(momentum >= 0, ErrorKind::kConfig, "[optim.{}] found momentum {}, wanted at least 0", verb, momentum);
    TESSERA_CHECK(
        !flag_of(settings, "nesterov") || (momentum > 0 && dampening == 0), ErrorKind::kConfig,
        "[optim.{}] found momentum {} and dampening {} with nesterov, wanted momentum above 0 and dampening 0", verb,
        momentum, dampening);
    TESSERA_CHECK(!flag_of(settings, "maximize"), ErrorKind::kConfig,
                  "[optim.{}] found maximize, wanted minimization: this SGD does not maximize. Negate the loss.", verb);
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
