// The kernels as operations of the dispatcher, namespace tessera: one implementation for plain tensors, a derivative,
// and for DTensors a sharding rule each.
//
//   static const auto op = operation<at::Tensor(const at::Tensor&, const at::Tensor&)>("tessera::swiglu");
//   at::Tensor y = op.call(gate, up);
//
// They are defined at first use. Thread-safe.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "tessera/dtensor/dispatch/rule.h"

namespace tessera::kernels {

// Defines all operations and registers their rules, once.
void ensure_operations();

template <class Signature>
c10::TypedOperatorHandle<Signature> operation(const char* name) {
  ensure_operations();
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// An operation that is the derivative of another and has none of its own: asking for it is an error.
void has_no_derivative(torch::Library& library, const char* name);

// One a file: schemas and implementations; the rules separately, since they need the schemas in place.
void define_linear(torch::Library& library);
void define_rms_norm(torch::Library& library);
void define_rotary(torch::Library& library);
void define_gated(torch::Library& library);
void define_linear_cross_entropy(torch::Library& library);
void define_causal_attention(torch::Library& library);
void register_linear_rules();
void register_rms_norm_rules();
void register_rotary_rules();
void register_gated_rules();
void register_linear_cross_entropy_rules();
void register_causal_attention_rules();

// fp32, or fp64 for fp64: what halves are computed in.
inline at::ScalarType wide_type(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

// The operation is linear in these inputs together, the others being whole: what is left to add up passes.
void add_partial_of(const OpCall& call, Proposal& proposal, std::initializer_list<int> inputs);

}  // namespace tessera::kernels
