// C++ values in the saved_data of an autograd context, for the backward pass.
//
//   ctx->saved_data["part"] = hold_value(part);
//   const auto& part = held_value<VocabPart>(ctx->saved_data["part"]);
#pragma once

#include <ATen/core/ivalue.h>

#include <utility>

namespace tessera {

template <class T>
struct HeldValue final : torch::CustomClassHolder {
  explicit HeldValue(T given) : value(std::move(given)) {}
  T value;
};

template <class T>
c10::IValue hold_value(T value) {
  return c10::IValue::make_capsule(c10::make_intrusive<HeldValue<T>>(std::move(value)));
}

// Returns the value that hold_value() stored; T must be the same type. The reference is valid as long as `held`.
template <class T>
const T& held_value(const c10::IValue& held) {
  return static_cast<const HeldValue<T>&>(*held.toCapsule()).value;
}

}  // namespace tessera
