#include <ATen/core/Tensor.h>

#include "tessera/optim/detail/adamw_update.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

class AdamW : public Optimizer {
 public:
  AdamW(nn::Module& module, const AdamWOptions& options)
      : Optimizer(module, options.lr, {detail::adamw_settings(options)}, options.groups,
                  {options.master_weights, options.stochastic_rounding, options.seed}, {}) {
    set_up_groups("make_adamw");
  }

 private:
  void apply(const std::vector<ParameterUpdate>& updates, const SettingsGroup& group) override {
    detail::apply_adamw(updates, group.lr, group.settings, found_inf());
  }

  bool kernel_takes_found_inf() const override { return true; }

  void check(const Hyperparameters& settings, const char* verb) const override { detail::check_adamw(settings, verb); }

  std::vector<std::string> state_names(const Hyperparameters&) const override { return detail::adamw_states(); }
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw(nn::Module& module, const AdamWOptions& options) {
  return std::make_unique<AdamW>(module, options);
}

}  // namespace tessera::optim
