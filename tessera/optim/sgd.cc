#include <ATen/core/Tensor.h>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

class Sgd : public Optimizer {
 public:
  Sgd(nn::Module& module, const SgdOptions& options)
      : Optimizer(module, options.lr, options.weight_decay, options.groups,
                  options.momentum > 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{},
                  {options.master_weights, options.stochastic_rounding, options.seed}),
        momentum_(options.momentum),
        dampening_(options.dampening),
        nesterov_(options.nesterov) {
    TESSERA_CHECK(momentum_ >= 0, ErrorKind::kConfig, "[optim.make_sgd] found momentum {}, wanted at least 0",
                  momentum_);
    TESSERA_CHECK(!nesterov_ || (momentum_ > 0 && dampening_ == 0), ErrorKind::kConfig,
                  "[optim.make_sgd] nesterov wants momentum above 0 and no dampening, found {} and {}", momentum_,
                  dampening_);
  }

 private:
  void apply(const std::vector<Update>& updates, double lr, double weight_decay) override {
    for (const auto& [entry, value, gradient] : updates) {
      at::Tensor direction = weight_decay == 0 ? gradient : gradient.add(value, weight_decay);
      if (momentum_ > 0) {
        at::Tensor& buffer = entry->state.at("momentum_buffer");
        // The first step takes the gradient as it is, without dampening.
        const bool first = entry->step.item<float>() == 1;
        buffer.mul_(momentum_).add_(direction, first ? 1.0 : 1.0 - dampening_);
        direction = nesterov_ ? direction.add(buffer, momentum_) : buffer;
      }
      value.add_(direction, -lr);
    }
  }

  double momentum_;
  double dampening_;
  bool nesterov_;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(nn::Module& module, const SgdOptions& options) {
  return std::make_unique<Sgd>(module, options);
}

}  // namespace tessera::optim
