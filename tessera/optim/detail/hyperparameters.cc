#include "tessera/optim/detail/hyperparameters.h"

#include <c10/core/GradMode.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::optim::detail {

const Hyperparameter* find_hyperparameter(const Hyperparameters& settings, std::string_view name) {
  for (const auto& [key, value] : settings) {
    if (key == name) return &value;
  }
  return nullptr;
}

void set_hyperparameter(Hyperparameters& settings, std::string_view name, Hyperparameter value) {
  if (const auto* found = find_hyperparameter(settings, name)) {
    *const_cast<Hyperparameter*>(found) = std::move(value);
  } else {
    settings.emplace_back(name, std::move(value));
  }
}

double number_of(const Hyperparameters& settings, std::string_view name) {
  const auto* value = find_hyperparameter(settings, name);
  if (value && std::holds_alternative<double>(*value)) return std::get<double>(*value);
  TESSERA_CHECK(value && std::holds_alternative<int64_t>(*value), ErrorKind::kConfig,
                "[optim] {} is {}, wanted a number", quote(name), value ? "of another type" : "missing");
  return static_cast<double>(std::get<int64_t>(*value));
}

std::pair<double, double> pair_of(const Hyperparameters& settings, std::string_view name) {
  const auto* value = find_hyperparameter(settings, name);
  const auto* numbers = value ? std::get_if<std::vector<double>>(value) : nullptr;
  TESSERA_CHECK(numbers && numbers->size() == 2, ErrorKind::kConfig, "[optim] {} is {}, wanted two numbers",
                quote(name), value ? "of another type" : "missing");
  return {numbers->front(), numbers->back()};
}

bool flag_of(const Hyperparameters& settings, std::string_view name) {
  const auto* value = find_hyperparameter(settings, name);
  TESSERA_CHECK(value && std::holds_alternative<bool>(*value), ErrorKind::kConfig,
                "[optim] {} is {}, wanted true or false", quote(name), value ? "of another type" : "missing");
  return std::get<bool>(*value);
}

}  // namespace tessera::optim::detail

namespace tessera::optim {

void Optimizer::set_lr(double lr) {
  lr_ = lr;
  for (auto& group : groups_) group.lr = lr * group.lr_factor;
}

std::vector<ParamGroup> Optimizer::param_groups() const {
  std::vector<ParamGroup> out;
  for (const auto& group : groups_) {
    auto& shown = out.emplace_back();
    shown.hyperparameters.emplace_back("lr", group.lr);
    shown.hyperparameters.insert(shown.hyperparameters.end(), group.settings.begin(), group.settings.end());
    for (const size_t entry : group.entries) shown.params.push_back(entries_[entry].name);
  }
  return out;
}

std::vector<Optimizer::SettingsGroup> Optimizer::changed_groups(const std::vector<Hyperparameters>& groups) const {
  TESSERA_CHECK(groups.size() == groups_.size(), ErrorKind::kConfig,
                "[optim.set_hyperparameters] found settings of {} groups, wanted the {} groups of this optimizer",
                groups.size(), groups_.size());
  auto changed = groups_;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [name, value] : groups[i]) {
      const auto* own = detail::find_hyperparameter(changed[i].settings, name);
      TESSERA_CHECK(
          name != kind_setting_ || !own || *own == value, ErrorKind::kConfig,
          "[optim.set_hyperparameters] group {}: found another {} than this optimizer was made with; the setting "
          "decides how parameters are updated and cannot change. Load the state of an optimizer with the same "
          "setting.",
          i, kind_setting_);
      if (name == "lr") {
        changed[i].lr = detail::number_of(groups[i], "lr");
      } else {
        detail::set_hyperparameter(changed[i].settings, name, value);
      }
    }
    const double decay = detail::number_of(changed[i].settings, "weight_decay");
    TESSERA_CHECK(changed[i].lr >= 0 && decay >= 0, ErrorKind::kConfig,
                  "[optim.set_hyperparameters] group {}: found lr {} and weight decay {}, wanted none below 0", i,
                  changed[i].lr, decay);
    check(changed[i].settings, "set_hyperparameters");
    changed[i].state_names = state_names(changed[i].settings);
  }
  return changed;
}

std::vector<std::vector<std::string>> Optimizer::check_hyperparameters(
    const std::vector<Hyperparameters>& groups) const {
  std::vector<std::vector<std::string>> names;
  for (const auto& group : changed_groups(groups)) names.push_back(group.state_names);
  return names;
}

// Returns the new lr(). has_lr[i] says whether the caller of set_hyperparameters() gave an lr for group i. The
// candidates are the groups with a given lr and an lr_factor above 0. The first candidate whose lr is not 0 decides:
// the result is lr / lr_factor. This group keeps its lr_factor, so a learning-rate schedule continues unchanged. If all
// candidates have lr 0, the result is 0; without candidates it is the present lr(). Instead of a result of 0, the first
// given lr other than 0 is returned, if there is one.
double Optimizer::fitted_lr(const std::vector<SettingsGroup>& groups, const std::vector<bool>& has_lr) const {
  double base = lr_;
  bool is_fitted = false;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (!has_lr[i] || groups[i].lr_factor == 0 || (is_fitted && base != 0)) continue;
    base = groups[i].lr / groups[i].lr_factor;
    is_fitted = true;
  }
  for (size_t i = 0; i < groups.size() && base == 0; ++i) base = has_lr[i] ? groups[i].lr : 0;
  return base;
}

// All checks run on a copy of the groups first. A group that is not given an lr then gets the new lr() times its
// lr_factor. A group that is given an lr uses it; its lr_factor changes if that lr differs from lr() * lr_factor by
// more than a rounding error.
void Optimizer::set_hyperparameters(const std::vector<Hyperparameters>& groups) {
  auto changed = changed_groups(groups);
  std::vector<bool> has_lr;
  for (const auto& settings : groups) has_lr.push_back(detail::find_hyperparameter(settings, "lr") != nullptr);
  const double base = fitted_lr(changed, has_lr);
  for (size_t i = 0; i < changed.size(); ++i) {
    auto& group = changed[i];
    if (!has_lr[i]) {
      if (base != lr_) group.lr = base * group.lr_factor;
    } else if (std::abs(group.lr - base * group.lr_factor) > 1e-12 * group.lr) {
      group.lr_factor = group.lr / base;
    }
  }
  lr_ = base;
  groups_ = std::move(changed);
  fit_state_to_settings();
}

}  // namespace tessera::optim
