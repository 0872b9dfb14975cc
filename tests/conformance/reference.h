// What a sample gives on plain tensors, and how an operation is called either way.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/conformance/placing.h"

namespace tessera::testing {

// What a call leaves behind: the tensors it returned, then the arguments it wrote to.
struct Outcome {
  Tensors tensors;                  // undefined ones included
  std::vector<c10::IValue> others;  // returned numbers and booleans
};

// Calls the operation; `slots` say which arguments are written to.
Outcome call(const Sample& sample, const std::vector<Slot>& slots, const std::vector<c10::IValue>& args);

struct Reference {
  Sample sample;
  std::vector<Slot> slots{};
  Outcome outcome{};
  // Gradients of the slots for flows[i] into outcome.tensors[i]; empty without gradients.
  Tensors flows{};
  Tensors gradients{};
  bool is_out = false;  // has out= arguments, which are made from the result of `functional`
  bool is_view = false;
  bool writes = false;                 // to an argument that is not out=
  std::optional<Sample> functional{};  // of an out= form: the same without out

  // What the plain backward says instead of giving gradients, in one line; empty when it gives some, or when nothing of
  // the outcome has any.
  std::string no_backward{};
  // Arguments that the operation has no derivative for though it has one for others, by name: they are constants.
  std::vector<std::string> constants{};

  bool differentiable() const { return !gradients.empty(); }
  bool is_leaf(const Slot& slot) const;  // of autograd
  // Whether the operation may end with this error instead of a result: refusal_text.h.
  bool may_refuse(const std::string& error) const;
};

// Operations that draw numbers do so from this seed.
inline constexpr uint64_t kDrawSeed = 11;

// Throws when the plain operation fails on the sample. Of an operation that draws, `outcome` is what it gives on a mesh
// of one rank.
Reference make_reference(const Sample& sample);

// Zeros that lie as the results of the form without out= do on these tensors.
std::vector<at::Tensor> outs_like(const Reference& reference, const std::vector<Slot>& slots, const Tensors& tensors);

// Leaves of autograd, where they can be.
bool takes_gradient(const at::Tensor& tensor);
// Gradients of all slots that take one; undefined where nothing flows.
Tensors gradients_of(const Outcome& outcome, const Tensors& leaves, const Tensors& flows);
// Arguments for a call that must not write to `leaves`: those that are written to are copied.
Tensors writable(const std::vector<Slot>& slots, const Tensors& leaves);

}  // namespace tessera::testing
