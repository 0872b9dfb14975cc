#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/nn/layers.h"
#include "tessera/optim/detail/adamw_update.h"
#include "tessera/optim/detail/chunks.h"
#include "tessera/optim/detail/hyperparameters.h"
#include "tessera/optim/detail/orthogonalize.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {
namespace {

using detail::flag_of;
using detail::number_of;

constexpr const char* kUseMuon = "use_muon";  // the name in Keller Jordan's MuonWithAuxAdam

Hyperparameters muon_settings(const MuonOptions& options) {
  return {{"weight_decay", options.weight_decay},
          {"momentum", options.momentum},
          {"nesterov", options.nesterov},
          {"ns_coefficients", options.ns_coefficients},
          {"eps", options.eps},
          {"ns_steps", options.ns_steps},
          {"adjust_lr_fn", options.adjust_lr_fn},
          {kUseMuon, true}};
}

Hyperparameters adamw_settings_of_muon(const MuonOptions& options) {
  auto adamw = options.adamw;
  adamw.weight_decay = options.weight_decay;
  auto settings = detail::adamw_settings(adamw);
  settings.emplace_back(kUseMuon, false);
  return settings;
}

size_t kind_of_muon(const nn::NamedParameter& named) {
  const bool of_vocabulary =
      dynamic_cast<nn::Embedding*>(named.owner) != nullptr || dynamic_cast<nn::Head*>(named.owner) != nullptr;
  return named.slot->parameter.dim() == 2 && !of_vocabulary ? 0 : 1;
}

std::vector<double> coefficients_of(const Hyperparameters& settings) {
  const auto* value = detail::find_hyperparameter(settings, "ns_coefficients");
  const auto* numbers = value ? std::get_if<std::vector<double>>(value) : nullptr;
  TESSERA_CHECK(numbers && numbers->size() == 3, ErrorKind::kConfig,
                "[optim.muon] ns_coefficients: coefficients must be a tuple of exactly 3 values");
  return *numbers;
}

// Returns the factor by which lr is multiplied for a matrix of this shape. An adjust_lr_fn of None means "original", as
// in torch.optim.Muon.
double lr_ratio(const Hyperparameters& settings, c10::IntArrayRef shape, const char* verb) {
  const auto* value = detail::find_hyperparameter(settings, "adjust_lr_fn");
  const bool none = !value || std::holds_alternative<std::monostate>(*value);
  const auto* name = none ? nullptr : std::get_if<std::string>(value);
  TESSERA_CHECK(none || (name && (*name == "original" || *name == "match_rms_adamw")), ErrorKind::kConfig,
                "[optim.{}] Adjust learning rate function {} is not supported: use original or match_rms_adamw", verb,
                name ? *name : "of another type");
  const auto rows = static_cast<double>(shape[0]), columns = static_cast<double>(shape[1]);
  if (none || *name == "original") return std::sqrt(std::max(1.0, rows / columns));
  return 0.2 * std::sqrt(std::max(rows, columns));
}

class Muon : public Optimizer {
 public:
  Muon(nn::Module& module, const MuonOptions& options)
      : Optimizer(module, options.lr, {muon_settings(options), adamw_settings_of_muon(options)}, options.groups,
                  {options.master_weights, options.stochastic_rounding, options.seed},
                  {.kind_of = kind_of_muon, .setting = kUseMuon}) {
    set_up_groups("make_muon");
  }

 private:
  // Computes the update directions of all matrices first. orthogonalize_all() then distributes the matrices over the
  // ranks of their mesh and gives this rank its shard of each orthogonalized direction.
  void apply(const std::vector<ParameterUpdate>& updates, const SettingsGroup& group) override {
    if (!flag_of(group.settings, kUseMuon)) return detail::apply_adamw(updates, group.lr, group.settings);
    const double weight_decay = number_of(group.settings, "weight_decay");
    std::vector<at::Tensor> matrices;
    detail::for_each_chunk(
        updates, [](const ParameterUpdate& update) { return update.value.numel(); },
        [&](const std::vector<ParameterUpdate>& chunk) {
          for (const auto& part : directions_of(chunk, group)) {
            matrices.push_back(as_dtensor_like(updates[matrices.size()].entry->parameter, part));
          }
        });
    const detail::NewtonSchulz newton_schulz{.coefficients = coefficients_of(group.settings),
                                             .steps = static_cast<int64_t>(number_of(group.settings, "ns_steps")),
                                             .eps = number_of(group.settings, "eps")};
    detail::orthogonalize_all(matrices, newton_schulz, [&](size_t i, const at::Tensor& part) {
      const auto& [entry, value, gradient] = updates[i];
      value.mul_(1 - group.lr * weight_decay);
      value.add_(part, -group.lr * lr_ratio(group.settings, entry->parameter.sizes(), "muon"));
    });
  }

  // Updates the momentum buffers with the gradients. Returns this rank's shards of the update directions, bfloat16.
  static std::vector<at::Tensor> directions_of(const std::vector<ParameterUpdate>& updates,
                                               const SettingsGroup& group) {
    const double momentum = number_of(group.settings, "momentum");
    std::vector<at::Tensor> buffers, gradients, out;
    for (const auto& [entry, value, gradient] : updates) {
      buffers.push_back(entry->state.at("momentum_buffer"));
      gradients.push_back(gradient);
      out.push_back(at::empty(gradient.sizes(), gradient.options().dtype(at::kBFloat16)));
    }
    at::_foreach_lerp_(buffers, gradients, 1 - momentum);
    const bool nesterov = flag_of(group.settings, "nesterov");
    at::_foreach_copy_(out, nesterov ? at::_foreach_lerp(gradients, buffers, momentum) : buffers);
    return out;
  }

  static at::Tensor as_dtensor_like(const at::Tensor& parameter, const at::Tensor& part) {
    if (!is_dtensor(parameter)) return part;
    return from_local(part, device_mesh(parameter), placements(parameter),
                      {.shape = parameter.sizes().vec(), .stride = parameter.strides().vec()});
  }

  void check(const Hyperparameters& settings, const char* verb) const override {
    if (!flag_of(settings, kUseMuon)) return detail::check_adamw(settings, verb);
    const double momentum = number_of(settings, "momentum"), steps = number_of(settings, "ns_steps");
    TESSERA_CHECK(momentum >= 0 && number_of(settings, "eps") >= 0, ErrorKind::kConfig,
                  "[optim.{}] momentum should be >= 0 but is: {}", verb, momentum);
    TESSERA_CHECK(steps >= 0 && steps < 100, ErrorKind::kConfig,
                  "[optim.{}] ns_steps: number of steps must be less than 100 for computational efficiency, found {}",
                  verb, steps);
    flag_of(settings, "nesterov");
    coefficients_of(settings);
    lr_ratio(settings, {1, 1}, verb);
  }

  bool communicates() const override { return true; }

  std::vector<std::string> state_names(const Hyperparameters& settings) const override {
    return flag_of(settings, kUseMuon) ? std::vector<std::string>{"momentum_buffer"} : detail::adamw_states();
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_muon(nn::Module& module, const MuonOptions& options) {
  return std::make_unique<Muon>(module, options);
}

}  // namespace tessera::optim
