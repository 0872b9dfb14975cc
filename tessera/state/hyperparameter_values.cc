#include "tessera/state/hyperparameter_values.h"

#include <algorithm>
#include <optional>

#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/state/state_dict_structure.h"

namespace tessera {
namespace {

bool is_membership(const StateKey& key) { return key == StateKey("params") || key == StateKey("param_names"); }

std::optional<std::vector<double>> numbers_of(const StateList& items) {
  std::vector<double> numbers;
  for (const auto& item : items) {
    if (item.is_tensor() && item.tensor().defined() && item.tensor().numel() == 1) {
      numbers.push_back(local_tensor_of(item.tensor().detach()).item().toDouble());
    } else if (item.is_int() || item.is_double()) {
      numbers.push_back(item.number());
    } else {
      return std::nullopt;
    }
  }
  return numbers;
}

std::optional<optim::Hyperparameter> to_hyperparameter(const StateValue& value) {
  using optim::Hyperparameter;
  if (value.is_none()) return Hyperparameter(std::monostate());
  if (value.is_bool()) return Hyperparameter(std::get<bool>(value.variant()));
  if (value.is_int()) return Hyperparameter(value.integer());
  if (value.is_double()) return Hyperparameter(value.number());
  if (value.is_string()) return Hyperparameter(value.string());
  if (value.is_tensor()) {
    const auto number = numbers_of({value});
    return number ? std::optional<Hyperparameter>(number->front()) : std::nullopt;
  }
  const auto* items = items_of(value);
  const auto numbers = items ? numbers_of(*items) : std::nullopt;
  return numbers ? std::optional<Hyperparameter>(*numbers) : std::nullopt;
}

}  // namespace

StateValue to_state_value(const optim::Hyperparameter& value) {
  return std::visit(
      [](const auto& held) -> StateValue {
        using T = std::decay_t<decltype(held)>;
        if constexpr (std::is_same_v<T, std::monostate>) {
          return {};
        } else if constexpr (std::is_same_v<T, std::vector<double>>) {
          StateTuple tuple;
          for (const double each : held) tuple.items.emplace_back(each);
          return tuple;
        } else {
          return held;
        }
      },
      value);
}

StateDict to_state_dict(const optim::Hyperparameters& hyperparameters) {
  StateDict out;
  for (const auto& [name, value] : hyperparameters) out.set(name, to_state_value(value));
  return out;
}

optim::Hyperparameters hyperparameters_of(const StateDict& group) {
  optim::Hyperparameters out;
  for (const auto& [key, value] : group) {
    if (is_membership(key)) continue;
    if (auto converted = to_hyperparameter(value)) {
      out.emplace_back(to_string(key), std::move(*converted));
    } else {
      log_warning("[state.load_optimizer] {} of a parameter group is a {}, which no optimizer here can hold: left out",
                  quote(to_string(key)), type_name(value));
    }
  }
  return out;
}

// Every hyper-parameter of `a` must have an equal value in `b`. `names` is the number of hyper-parameters in `a` minus
// the number in `b`; it must be 0, so that `b` has no others.
bool same_hyperparameters(const StateDict& a, const StateDict& b) {
  size_t names = 0;
  for (const auto& [key, value] : a) {
    if (is_membership(key)) continue;
    const auto* other = b.find(key);
    if (other == nullptr || !same_values(value, *other)) return false;
    ++names;
  }
  for (const auto& [key, value] : b) names -= is_membership(key) ? 0 : 1;
  return names == 0;
}

// check_hyperparameters() is called with empty lists, which change no hyper-parameter. It returns for each parameter
// group the names of the states besides `master` and `step`. Without such names the optimizer keeps no state.
bool keeps_no_state(const optim::Optimizer& optimizer) {
  const std::vector<optim::Hyperparameters> unchanged(optimizer.param_groups().size());
  return std::ranges::all_of(optimizer.check_hyperparameters(unchanged),
                             [](const auto& states) { return states.empty(); });
}

}  // namespace tessera
