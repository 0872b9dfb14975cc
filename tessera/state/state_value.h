// The values of a state dict, of the types that PyTorch's state dicts have: tensors (also DTensors), sharded tensors,
// numbers, text, bytes, and lists, tuples and dicts of these.
//
//   StateDict model;
//   model.set("layers.0.weight", weight);                          // insertion order is kept
//   StateDict optimizer{{"state", states}, {"param_groups", StateList{group}}};
//   for (const auto& [key, value] : optimizer) ...
//   const at::Tensor& step = model.at("step").tensor();
//
// A copy shares its tensors with the original and nothing else. Not thread-safe. Keys are text or integers (parameter
// ids of torch.optim).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

struct ShardedTensor;  // state/sharded_tensor.h
class StateValue;

using StateKey = std::variant<int64_t, std::string>;
std::string to_string(const StateKey& key);
// Convert a key to a value, and a value to a key. Error kShape for a value that is neither an int nor text.
StateValue to_value(const StateKey& key);
StateKey to_key(const StateValue& value);

// A dict that keeps insertion order. Finding a key takes constant time.
class StateDict {
 public:
  using Item = std::pair<StateKey, StateValue>;

  StateDict() = default;
  StateDict(std::initializer_list<Item> items);  // a later item overwrites an earlier one with its key

  bool empty() const { return index_.empty(); }
  size_t size() const { return index_.size(); }
  bool contains(const StateKey& key) const { return index_.contains(key); }
  // Returns nullptr for a key that is not in the dict.
  const StateValue* find(const StateKey& key) const;
  StateValue* find(const StateKey& key);
  // Returns the value of `key`. Error kShape if the dict does not have the key.
  const StateValue& at(const StateKey& key) const;
  StateValue& at(const StateKey& key);
  // Inserts at the end, or overwrites the value of an existing key. Returns the stored value; a later insertion
  // invalidates the reference.
  StateValue& set(StateKey key, StateValue value);
  // Removes `key` and its value; does nothing if the dict does not have the key. The call takes time linear in the size
  // of the dict.
  void erase(const StateKey& key);

  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }
  auto begin() { return items_.begin(); }  // keys must not be changed
  auto end() { return items_.end(); }

 private:
  std::vector<Item> items_;
  std::unordered_map<StateKey, size_t> index_;
};

using StateList = std::vector<StateValue>;
struct StateTuple {
  StateList items;
};
struct StateBytes {
  std::string bytes;
};

class StateValue {
 public:
  using Variant = std::variant<std::monostate, bool, int64_t, double, std::string, StateBytes, at::Tensor,
                               std::shared_ptr<ShardedTensor>, StateList, StateTuple, StateDict>;

  StateValue() = default;  // None
  StateValue(std::nullptr_t) {}
  StateValue(bool value) : value_(value) {}
  StateValue(int value) : value_(int64_t{value}) {}
  StateValue(int64_t value) : value_(value) {}
  StateValue(double value) : value_(value) {}
  StateValue(const char* value) : value_(std::string(value)) {}
  StateValue(std::string value) : value_(std::move(value)) {}
  StateValue(StateBytes value) : value_(std::move(value)) {}
  StateValue(at::Tensor value) : value_(std::move(value)) {}
  StateValue(std::shared_ptr<ShardedTensor> value) : value_(std::move(value)) {}
  StateValue(StateList value) : value_(std::move(value)) {}
  StateValue(StateTuple value) : value_(std::move(value)) {}
  StateValue(StateDict value) : value_(std::move(value)) {}

  bool is_none() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_int() const { return std::holds_alternative<int64_t>(value_); }
  bool is_double() const { return std::holds_alternative<double>(value_); }
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_bytes() const { return std::holds_alternative<StateBytes>(value_); }
  bool is_tensor() const { return std::holds_alternative<at::Tensor>(value_); }  // plain or DTensor
  bool is_sharded() const { return std::holds_alternative<std::shared_ptr<ShardedTensor>>(value_); }
  bool is_list() const { return std::holds_alternative<StateList>(value_); }
  bool is_tuple() const { return std::holds_alternative<StateTuple>(value_); }
  bool is_dict() const { return std::holds_alternative<StateDict>(value_); }

  // These functions return the value as the type that the function is named after. Error kShape, which names the wanted
  // type and the actual type, when the value has another type.
  const at::Tensor& tensor() const;
  at::Tensor& tensor();
  const std::shared_ptr<ShardedTensor>& sharded() const;
  const StateDict& dict() const;
  StateDict& dict();
  const StateList& list() const;
  StateList& list();
  const std::string& string() const;
  int64_t integer() const;
  double number() const;  // also for an int

  const Variant& variant() const { return value_; }
  Variant& variant() { return value_; }

 private:
  Variant value_;
};

// Returns the items of a list or a tuple, or null for any other value.
const StateList* items_of(const StateValue& value);

// Returns the name of the value's type for messages: "Tensor", "DTensor", "ShardedTensor", "int", "dict", ...
const char* type_name(const StateValue& value);
// Formats a value for messages: numbers, text and tensors without dims by value, any other value by its type.
std::string scalar_text(const StateValue& value);

}  // namespace tessera
