// What handlers, rules and kernels ask of the dispatch of a call.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <string>

#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

// What a call without a handler does. Dispatch must be below autograd.
void dispatch_by_rule(const OpEntry& op, c10::DispatchKeySet keys, Stack& stack);

// Whether this thread runs the formula of a derivative: nobody can redistribute before it what it cannot take.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// In force on its thread while an operation that is made of others runs and gives new tensors: the views that it takes
// on the way need not alias, so what cannot be viewed where it lies is gathered. gathering_composites.cc.
class GatheringViews {
 public:
  GatheringViews();
  ~GatheringViews();
  GatheringViews(const GatheringViews&) = delete;
  GatheringViews& operator=(const GatheringViews&) = delete;
  static bool in_force();

 private:
  bool before_;
};
// A result of such an operation: a view of a gathered copy becomes a tensor of its own, which may be written to.
at::Tensor own_result(const at::Tensor& result);

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

// Error kShape where as_strided would give another shape or other strides than self has, or start elsewhere.
void check_as_strided(const std::string& op, const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      int64_t offset);

}  // namespace tessera
