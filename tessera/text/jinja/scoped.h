// Gives a variable another value until the end of a block.
//
//   const Scoped inside(scope_, inner_scope(scope_));  // the destructor restores the old value, also after a failure
#pragma once

#include <utility>

namespace tessera::text::jinja {

template <class T>
class Scoped {
 public:
  Scoped(T& variable, T value) : variable_(variable), before_(std::exchange(variable, std::move(value))) {}
  ~Scoped() { variable_ = std::move(before_); }
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 private:
  T& variable_;
  T before_;
};

}  // namespace tessera::text::jinja
