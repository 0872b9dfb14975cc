// Stores C++ values of any type in AutogradContext::saved_data, for the backward of an autograd Function.
//
//   ctx->saved_data["part"] = make_saved_value(part);
//   const auto& part = saved_value<VocabShard>(ctx->saved_data["part"]);
#pragma once

#include <ATen/core/ivalue.h>

#include <utility>

namespace tessera {

template <class T>
struct SavedValue final : torch::CustomClassHolder {
  explicit SavedValue(T initial) : value(std::move(initial)) {}
  T value;
};

template <class T>
c10::IValue make_saved_value(T value) {
  return c10::IValue::make_capsule(c10::make_intrusive<SavedValue<T>>(std::move(value)));
}

// Returns the value that make_saved_value() stored; T must be the same type. The reference is valid as long as `saved`
// exists.
template <class T>
const T& saved_value(const c10::IValue& saved) {
  return static_cast<const SavedValue<T>&>(*saved.toCapsule()).value;
}

}  // namespace tessera
