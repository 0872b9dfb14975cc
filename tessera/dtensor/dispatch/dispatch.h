// Functions and scopes of the DTensor dispatch that handlers, rules and composite kernels use.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <string>

#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

// Runs a call that has no handler: finds or makes its plan and runs it. The caller must hold an
// at::AutoDispatchBelowADInplaceOrView, so that the operations of the plan are not recorded by autograd.
void dispatch_by_rule(const OpInfo& op, c10::DispatchKeySet keys, Stack& stack);

// Whether this thread runs a backward pass. Callers then accept calls that are errors in forward, because the user
// cannot redistribute an operand inside a derivative formula.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// Usually a view operation is an error if its result cannot share memory with the sharded local tensor. While an object
// of this class exists on a thread, such an operation gathers the sharded dim and returns a view of the gathered copy.
// gathering_composites.cc uses the class while a composite operation that returns new tensors runs, because no other
// code sees the views that are made inside.
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
// Clones `result` if it is a view of a gathered copy, because writes to such a view are refused. Other tensors are
// returned unchanged.
at::Tensor clone_gathered_view(const at::Tensor& result);

// While an object of this class exists on a thread, a plain tensor counts as replicated if a hash of its values is the
// same on all ranks. gathering_composites.cc and decompose() use the class while a composite operation runs whose
// arguments contain no plain tensor of several elements. All plain tensors inside are then made by the operation itself
// from sizes and numbers (at::arange, at::zeros).
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

// Whether an argument is a plain tensor whose number of elements is not 1, or a list that contains one.
bool has_plain_tensor(c10::ArrayRef<c10::IValue> args);

// Raises Error kShape if the sizes, strides or offset that as_strided receives differ from those of self.
void check_as_strided(const std::string& op, const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      int64_t offset);

}  // namespace tessera
