#include "tessera/state/state_value.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

std::string to_string(const StateKey& key) {
  if (const auto* number = std::get_if<int64_t>(&key)) return std::to_string(*number);
  return std::get<std::string>(key);
}

StateValue to_value(const StateKey& key) {
  return std::visit([](const auto& held) { return StateValue(held); }, key);
}

StateKey to_key(const StateValue& value) {
  return value.is_int() ? StateKey(value.integer()) : StateKey(value.string());
}

StateDict::StateDict(std::initializer_list<Item> items) {
  for (const auto& [key, value] : items) set(key, value);
}

const StateValue* StateDict::find(const StateKey& key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &items_[found->second].second;
}

StateValue* StateDict::find(const StateKey& key) { return const_cast<StateValue*>(std::as_const(*this).find(key)); }

const StateValue& StateDict::at(const StateKey& key) const {
  const auto* value = find(key);
  TESSERA_CHECK(value, ErrorKind::kShape, "[state] no key {} among the {} of this dict", quote(to_string(key)), size());
  return *value;
}

StateValue& StateDict::at(const StateKey& key) { return const_cast<StateValue&>(std::as_const(*this).at(key)); }

StateValue& StateDict::set(StateKey key, StateValue value) {
  const auto [found, is_new] = index_.try_emplace(key, items_.size());
  if (is_new) return items_.emplace_back(std::move(key), std::move(value)).second;
  return items_[found->second].second = std::move(value);
}

// Removes the item and moves the indices of all later items down by one.
void StateDict::erase(const StateKey& key) {
  const auto found = index_.find(key);
  if (found == index_.end()) return;
  const auto position = found->second;
  index_.erase(found);
  items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(position));
  for (auto& [each, at] : index_) at -= at > position ? 1 : 0;
}

namespace {

template <class T>
const T& state_value_as(const StateValue& value, const char* expected_type) {
  const auto* found = std::get_if<T>(&value.variant());
  TESSERA_CHECK(found, ErrorKind::kShape, "[state] found a value of type {}, expected {}", type_name(value),
                expected_type);
  return *found;
}

}  // namespace

const at::Tensor& StateValue::tensor() const { return state_value_as<at::Tensor>(*this, "Tensor"); }
at::Tensor& StateValue::tensor() { return const_cast<at::Tensor&>(std::as_const(*this).tensor()); }
const std::shared_ptr<ShardedTensor>& StateValue::sharded() const {
  return state_value_as<std::shared_ptr<ShardedTensor>>(*this, "ShardedTensor");
}
const StateDict& StateValue::dict() const { return state_value_as<StateDict>(*this, "dict"); }
StateDict& StateValue::dict() { return const_cast<StateDict&>(std::as_const(*this).dict()); }
const StateList& StateValue::list() const { return state_value_as<StateList>(*this, "list"); }
StateList& StateValue::list() { return const_cast<StateList&>(std::as_const(*this).list()); }
const std::string& StateValue::string() const { return state_value_as<std::string>(*this, "str"); }
int64_t StateValue::integer() const { return state_value_as<int64_t>(*this, "int"); }
double StateValue::number() const {
  return is_int() ? static_cast<double>(integer()) : state_value_as<double>(*this, "float");
}

const StateList* items_of(const StateValue& value) {
  if (const auto* list = std::get_if<StateList>(&value.variant())) return list;
  const auto* tuple = std::get_if<StateTuple>(&value.variant());
  return tuple ? &tuple->items : nullptr;
}

const char* type_name(const StateValue& value) {
  static constexpr const char* kNames[] = {"NoneType", "bool",          "int",  "float", "str", "bytes",
                                           "Tensor",   "ShardedTensor", "list", "tuple", "dict"};
  static_assert(std::size(kNames) == std::variant_size_v<StateValue::Variant>);
  if (value.is_tensor() && is_dtensor(value.tensor())) return "DTensor";
  return kNames[value.variant().index()];
}

std::string scalar_text(const StateValue& value) {
  if (value.is_none()) return "None";
  if (value.is_string()) return quote(value.string());
  if (value.is_bool()) return std::get<bool>(value.variant()) ? "True" : "False";
  if (value.is_int()) return fmt::format("{}", value.integer());
  if (value.is_double()) return fmt::format("{}", value.number());
  if (!value.is_tensor() || !value.tensor().defined() || is_dtensor(value.tensor()) || value.tensor().is_meta() ||
      value.tensor().dim() > 0 || value.tensor().is_complex()) {
    return type_name(value);
  }
  const auto scalar = value.tensor().item();
  return scalar.isIntegral(/*includeBool=*/true) ? fmt::format("{}", scalar.toLong())
                                                 : fmt::format("{}", scalar.toDouble());
}

}  // namespace tessera
