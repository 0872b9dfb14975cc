#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/fsdp1/state/flatten_optim_state.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/model_names.h"
#include "tessera/state/state_dict_structure.h"
#include "tessera/state/state_message.h"

namespace tessera {
namespace {

enum class StateValueKind { kTensor, kScalarTensor, kOther };

StateValueKind state_kind(const StateValue& value) {
  const auto shape = value_shape(value);
  if (!shape) return StateValueKind::kOther;
  return shape->shape.empty() ? StateValueKind::kScalarTensor : StateValueKind::kTensor;
}

std::set<std::string> state_names(const StateDict& state, const std::string& fqn) {
  std::set<std::string> names;
  for (const auto& [key, value] : state) {
    TESSERA_CHECK(std::holds_alternative<std::string>(key), ErrorKind::kShape,
                  "[fsdp1.load] {}: found a state named by the number {}, expected text", quote(fqn), to_string(key));
    names.insert(std::get<std::string>(key));
  }
  return names;
}

bool has_tensors(const StateValue& value) {
  return any_leaf(value, [](const StateValue& leaf) { return leaf.is_tensor() || leaf.is_sharded(); });
}

// Checks that the values of one optimizer state (such as exp_avg) of the members of a unit fit together. All values
// must have the same StateValueKind. Tensors must have the same dtype, and each must have the shape of its member.
// Without use_orig_params, values of the other kinds must be equal, and no member may lack the state. A member with the
// value None counts as a member that lacks the state.
class UnitStateCheck {
 public:
  UnitStateCheck(const Fsdp1Unit& unit, const UnitStates& states, std::string name)
      : unit_(unit), name_(std::move(name)), missing_(states.size() < unit.fqns.size()) {
    for (const auto& [member, state] : states) {
      const auto& value = state.at(name_);
      if (value.is_none()) {
        missing_ = true;
      } else {
        values_.emplace_back(member, &value);
      }
    }
  }

  void run() const {
    if (values_.empty()) return;
    const auto kind = state_kind(*values_[0].second);
    for (const auto& [member, value] : values_) {
      const bool same_type =
          value->is_tensor() || value->is_sharded() || value->variant().index() == values_[0].second->variant().index();
      TESSERA_CHECK(state_kind(*value) == kind && same_type, ErrorKind::kShape,
                    "[fsdp1.load] Differing optimizer state types for state {}: {} is {}, {} is {}, and unflattened "
                    "parameter names {}. Save them with one optimizer.",
                    quote(name_), unit_.fqns[values_[0].first], type_name(*values_[0].second), unit_.fqns[member],
                    type_name(*value), quoted_list(unit_.fqns));
      check_local_shards(unit_.fqns[member] + "." + name_, *value);
    }
    if (kind == StateValueKind::kTensor) check_tensors();
    if (kind != StateValueKind::kTensor && !unit_.layout().use_orig_params()) check_common_value(kind);
  }

 private:
  void check_tensors() const {
    std::set<std::string> dtypes;
    for (const auto& [member, value] : values_) dtypes.insert(c10::toString(value_shape(*value)->dtype));
    TESSERA_CHECK(dtypes.size() == 1, ErrorKind::kShape,
                  "[fsdp1.load] All unflattened parameters comprising a single flat parameter must have "
                  "positive-dimension tensor state with the same dtype but got dtypes {} for state {} and unflattened "
                  "parameter names {}. Convert them.",
                  fmt::join(dtypes, ", "), quote(name_), quoted_list(unit_.fqns));
    for (const auto& [member, value] : values_) {
      const auto& shape = unit_.member_layouts[member].shape;
      TESSERA_CHECK(value_shape(*value)->shape == shape, ErrorKind::kShape,
                    "[fsdp1.load] {} of {}: Tensor optimizer state does not have same shape as its parameter: [{}] "
                    "[{}]. Load the state of this model.",
                    quote(name_), unit_.fqns[member], fmt::join(value_shape(*value)->shape, ", "),
                    fmt::join(shape, ", "));
    }
    if (!missing_ || unit_.layout().use_orig_params()) return;
    for (const auto& layout : unit_.member_layouts) {
      TESSERA_CHECK(!layout.shape.empty(), ErrorKind::kShape,
                    "[fsdp1.load] {}: Flattening a zero-dimension parameter is not supported. Give it shape [1].",
                    layout.name);
    }
  }

  // A flat parameter has one value, such as the step, for all its members, so the members' values must be equal and
  // none may be missing.
  void check_common_value(StateValueKind kind) const {
    std::set<std::string> shown, packed;
    std::set<std::string> dtypes;
    for (const auto& [member, value] : values_) {
      TESSERA_CHECK(kind == StateValueKind::kScalarTensor || !has_tensors(*value), ErrorKind::kShape,
                    "[fsdp1.load] {} of {}: found tensors inside a {}, which cannot be compared between the members of "
                    "a flat parameter. Keep them as states of their own, or wrap with use_orig_params.",
                    quote(name_), unit_.fqns[member], type_name(*value));
      shown.insert(scalar_text(*value));
      packed.insert(encode_state(*value, TensorsInMessage::kShapes));
      if (kind == StateValueKind::kScalarTensor) dtypes.insert(c10::toString(value->tensor().scalar_type()));
    }
    if (missing_) shown.insert("None");
    TESSERA_CHECK(!missing_ && packed.size() == 1, ErrorKind::kShape,
                  "[fsdp1.load] All unflattened parameters comprising a single flat parameter must have {} but got "
                  "values {{{}}}{} for state {} and unflattened parameter names {}. Train and save these parameters "
                  "together, or wrap with use_orig_params.",
                  kind == StateValueKind::kScalarTensor ? "scalar state with the same value and dtype"
                                                        : "state with the same value",
                  fmt::join(shown, ", "),
                  dtypes.empty() ? std::string() : fmt::format(" and dtypes {{{}}}", fmt::join(dtypes, ", ")),
                  quote(name_), quoted_list(unit_.fqns));
  }

  const Fsdp1Unit& unit_;
  const std::string name_;
  bool missing_;
  std::vector<std::pair<size_t, const StateValue*>> values_;  // values other than None
};

}  // namespace

// The members of a unit are its original parameters. The state of each member is compared with that of the first member
// that has state. Every check uses metadata and scalars only, so if all ranks have equal dicts, either all of them
// throw or none does.
void check_unit_states(const Fsdp1Unit& unit, const UnitStates& states, bool partial) {
  if (states.empty()) return;
  const auto names = state_names(states.begin()->second, unit.fqns[states.begin()->first]);
  for (const auto& [member, state] : states) {
    const auto own = state_names(state, unit.fqns[member]);
    TESSERA_CHECK(own.empty() || !unit.member_layouts[member].shape.empty(), ErrorKind::kShape,
                  "[fsdp1.load] {}: Flattening a zero-dimension parameter is not supported. Give it shape [1].",
                  unit.fqns[member]);
    TESSERA_CHECK(
        own == names, ErrorKind::kShape,
        "[fsdp1.load] Differing optimizer state names for the unflattened parameters: {}: {} has ({}), {} has "
        "({}). Save them with one optimizer.",
        quoted_list(unit.fqns), unit.fqns[states.begin()->first], fmt::join(names, ", "), unit.fqns[member],
        fmt::join(own, ", "));
  }
  if (unit.layout().use_orig_params() && !partial) {
    const auto trained = unit.trained();
    for (size_t member = 0; member < unit.fqns.size(); ++member) {
      TESSERA_CHECK(states.contains(member) || !trained[member] || unit.member_layout(member).numel() == 0,
                    ErrorKind::kShape,
                    "[fsdp1.load] {} has no state in the optimizer state dict, while {} of the same unit has. Save all "
                    "trained parameters, or freeze it before loading.",
                    unit.fqns[member], unit.fqns[states.begin()->first]);
    }
  }
  // The checks above ensure that all members have the same state names. Each state is now checked over all members.
  for (const auto& name : names) UnitStateCheck(unit, states, name).run();
}

}  // namespace tessera
