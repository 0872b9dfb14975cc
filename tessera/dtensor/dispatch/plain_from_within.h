// Plain tensors that operations made of others make on the way: at::arange, at::zeros.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace tessera {

// In force on its thread while an operation that is made of others runs and none of its arguments is a plain tensor of
// several elements: plain tensors that its parts meet were made on the way, from sizes and numbers (at::arange,
// at::zeros). Such a tensor counts as replicated where a hash of it is the same on all ranks. gathering_composites.cc.
class PlainFromWithin {
 public:
  explicit PlainFromWithin(const std::string& operation);
  ~PlainFromWithin();
  PlainFromWithin(const PlainFromWithin&) = delete;
  PlainFromWithin& operator=(const PlainFromWithin&) = delete;
  static const std::string* operation();  // the outermost one; null: none is in force

 private:
  const std::string* before_;
};

// Whether an argument is a plain tensor with another number of elements than one, or a list with such a tensor.
bool has_plain(c10::ArrayRef<c10::IValue> args);

}  // namespace tessera
