// Functions of the dispatch that handlers, rules and kernels use.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <string>

#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

// Runs a call that has no handler: finds or makes its plan and runs it. Dispatch must be below autograd.
void dispatch_by_rule(const OpInfo& op, c10::DispatchKeySet keys, Stack& stack);

// Whether this thread runs a backward pass. The user cannot redistribute an operand inside a derivative formula.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// While an object of this class exists on a thread, a view that cannot alias is a view of a gathered copy instead of an
// error. It is used while a composite operation that returns new tensors runs: no other code sees the views inside. See
// gathering_composites.cc.
class AllowGatheringViews {
 public:
  AllowGatheringViews();
  ~AllowGatheringViews();
  AllowGatheringViews(const AllowGatheringViews&) = delete;
  AllowGatheringViews& operator=(const AllowGatheringViews&) = delete;
  static bool in_force();

 private:
  bool before_;
};
// Clones a result that is a view of a gathered copy, so that the result may be written to. Other tensors are returned
// unchanged.
at::Tensor clone_gathered_view(const at::Tensor& result);

// While an object of this class exists on a thread, a plain tensor counts as replicated if a hash of its values is the
// same on all ranks. It is used while a composite operation runs whose arguments contain no plain tensor of several
// elements: then all plain tensors inside were made by the operation from sizes and numbers (at::arange, at::zeros).
// See gathering_composites.cc.
class AllowInternalPlainTensors {
 public:
  explicit AllowInternalPlainTensors(const std::string& operation);
  ~AllowInternalPlainTensors();
  AllowInternalPlainTensors(const AllowInternalPlainTensors&) = delete;
  AllowInternalPlainTensors& operator=(const AllowInternalPlainTensors&) = delete;
  static const std::string* operation();  // name of the outermost operation; null when no object exists

 private:
  const std::string* before_;
};

// Whether an argument is, or is a list with, a plain tensor whose number of elements is not 1.
bool has_plain_tensor(c10::ArrayRef<c10::IValue> args);

// Error kShape if the sizes, strides or offset for as_strided differ from those of self.
void check_as_strided(const std::string& op, const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      int64_t offset);

}  // namespace tessera
