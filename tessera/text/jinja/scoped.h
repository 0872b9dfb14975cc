// Gives a variable another value until the end of a block.
//
//   const ScopedValue inside(scope_, inner_scope(scope_));
//
// The destructor restores the old value, also after a failure.
#pragma once

#include <utility>

namespace tessera::text::jinja {

template <class T>
class ScopedValue {
 public:
  ScopedValue(T& variable, T value) : variable_(variable), before_(std::exchange(variable, std::move(value))) {}
  ~ScopedValue() { variable_ = std::move(before_); }
  ScopedValue(const ScopedValue&) = delete;
  ScopedValue& operator=(const ScopedValue&) = delete;

 private:
  T& variable_;
  T before_;
};

}  // namespace tessera::text::jinja
