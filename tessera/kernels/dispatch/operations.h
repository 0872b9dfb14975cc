// Registers the kernels as operations of PyTorch's dispatcher, in the namespace `tessera`. Each operation has one
// implementation for plain tensors, a derivative, and a sharding rule for DTensors.
//
//   constexpr Operation<&rotary_of> call_rotary{"tessera::rotary"};
//   at::Tensor y = call_rotary(x, cos, sin, /*back=*/false);
//
// The operations are defined at first use. Thread-safe.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "tessera/dtensor/dispatch/rule.h"

namespace tessera::kernels {

// Defines all operations and registers their sharding rules, once.
void ensure_operations();

template <class Signature>
c10::TypedOperatorHandle<Signature> operation(const char* name) {
  ensure_operations();
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Calls an operation by its name through the dispatcher. `kernel`, the operation's kernel for plain tensors, gives the
// types of the arguments and the result.
template <auto kernel>
struct Operation;
template <class Result, class... Arguments, Result (*kernel)(Arguments...)>
struct Operation<kernel> {
  const char* name;
  Result operator()(Arguments... arguments) const {
    static const auto found = operation<Result(Arguments...)>(name);
    return found.call(std::forward<Arguments>(arguments)...);
  }
};

// Defines one operation: its schema, its kernel for plain tensors and its derivative (TORCH_FN of each), and the
// sharding rule for DTensors.
template <class Kernel, class Derivative>
void define_operation(torch::Library& library, const char* schema, Kernel&& kernel, Derivative&& derivative,
                      Rule rule) {
  const std::string declaration = schema, name = declaration.substr(0, declaration.find('('));
  library.def(schema);
  library.impl(name.c_str(),
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, std::forward<Kernel>(kernel)));
  library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, std::forward<Derivative>(derivative)));
  register_rule("tessera::" + name, std::move(rule));
}

// Returns the derivative for an operation that has none (a backward operation): it raises an error in a double
// backward.
torch::CppFunction no_derivative();

// Each function defines the operations of one source file.
void define_linear(torch::Library& library);
void define_rms_norm(torch::Library& library);
void define_rotary(torch::Library& library);
void define_gated(torch::Library& library);
void define_linear_cross_entropy(torch::Library& library);
void define_causal_attention(torch::Library& library);

// For an operation that is linear in `inputs` together: adds strategies in which these inputs and the output are
// Partial and all other inputs are Replicate.
void add_partial_strategies(const OpCall& call, Proposal& proposal, std::initializer_list<int> inputs);

}  // namespace tessera::kernels
