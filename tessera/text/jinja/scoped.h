// A variable that has another value for the time of a block.
//
//   const Scoped inside(scope_, inner_scope(scope_));  // the old value is put back at the end, also of a failure
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
