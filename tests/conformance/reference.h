// The results of a sample on plain tensors, and calls of an operation with plain tensors or DTensors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/conformance/placing.h"

namespace tessera::testing {

// The results of a call: the tensors that it returned, then the arguments that it wrote to.
struct Outcome {
  Tensors tensors;                  // with undefined tensors
  std::vector<c10::IValue> others;  // returned numbers and booleans
};

// Calls the operation. `slots` say which arguments are written to.
Outcome call(const Sample& sample, const std::vector<Slot>& slots, const std::vector<c10::IValue>& args);

struct Reference {
  Sample sample;
  std::vector<Slot> slots{};
  Outcome outcome{};
  // Gradients of the slots for the incoming gradients flows[i] of outcome.tensors[i]. Empty without gradients.
  Tensors flows{};
  Tensors gradients{};
  bool is_out = false;  // has out= arguments, which are made from the result of `functional`
  bool is_view = false;
  bool writes = false;                 // writes to an argument that is not out=
  std::optional<Sample> functional{};  // of an out= form: the sample without out=

  // The error of the plain backward, in one line. Empty if it gives gradients, or if no result has one.
  std::string no_backward{};
  // Names of arguments for which the operation has no derivative, although it has one for others. They are passed as
  // constants.
  std::vector<std::string> constants{};

  bool differentiable() const { return !gradients.empty(); }
  bool is_leaf(const Slot& slot) const;  // leaf of autograd
  // Whether the operation may end with this error instead of a result, as refusal_text.h lists.
  bool may_refuse(const std::string& error) const;
};

// The seed of operations that draw numbers.
inline constexpr uint64_t kDrawSeed = 11;

// Throws if the plain operation fails on the sample. For a random operation, `outcome` is the result on a mesh of one
// rank.
Reference make_reference(const Sample& sample);

// Returns zeros with the placements that the results of the form without out= have for these tensors.
std::vector<at::Tensor> outs_like(const Reference& reference, const std::vector<Slot>& slots, const Tensors& tensors);

// Whether the tensor can be a leaf of autograd.
bool takes_gradient(const at::Tensor& tensor);
// Returns the gradients of all slots that take one. A gradient is undefined if no incoming gradient reaches it.
Tensors gradients_of(const Outcome& outcome, const Tensors& leaves, const Tensors& flows);
// Returns arguments for a call that must not write to `leaves`: tensors that the call writes to are copied.
Tensors writable(const std::vector<Slot>& slots, const Tensors& leaves);

}  // namespace tessera::testing
