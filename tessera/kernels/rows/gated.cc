#include "tessera/kernels/rows/gated.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/kernels/autograd/recomputed_activation.h"
#include "tessera/kernels/dispatch/operations.h"
#include "tessera/kernels/rows/elementwise_kernels.h"

namespace tessera::kernels {
namespace {

using GatePair = std::tuple<at::Tensor, at::Tensor>;

struct SiluGate {
  static constexpr const char* kName = "tessera::swiglu";
  static constexpr const char* kBackward = "tessera::swiglu_backward";
  static constexpr auto kGate = Gate::kSilu;
  static at::Tensor of(const at::Tensor& x) { return at::silu(x); }
  static at::Tensor derivative(const at::Tensor& grad, const at::Tensor& x) { return at::silu_backward(grad, x); }
  // Returns the same as derivative(), computed by operations that are differentiable themselves.
  static at::Tensor differentiable_derivative(const at::Tensor& grad, const at::Tensor& x) {
    const auto s = at::sigmoid(x);
    return grad * s * (1 + x * (1 - s));
  }
};

struct GeluTanhGate {
  static constexpr const char* kName = "tessera::geglu";
  static constexpr const char* kBackward = "tessera::geglu_backward";
  static constexpr auto kGate = Gate::kGeluTanh;
  static at::Tensor of(const at::Tensor& x) { return at::gelu(x, "tanh"); }
  static at::Tensor derivative(const at::Tensor& grad, const at::Tensor& x) {
    return at::gelu_backward(grad, x, "tanh");
  }
  static at::Tensor differentiable_derivative(const at::Tensor& grad, const at::Tensor& x) {
    return derivative(grad, x);
  }
};

bool runs_gate_loop(const at::Tensor& gate, const at::Tensor& up) {
  return supports_elementwise_kernels(gate) && up.device() == gate.device() && up.scalar_type() == gate.scalar_type() &&
         up.sizes() == gate.sizes();
}

template <class Activation>
at::Tensor gated_of(const at::Tensor& gate, const at::Tensor& up) {
  if (runs_gate_loop(gate, up)) {
    return elementwise_kernels(gate.device()).gate(Activation::kGate, gate.contiguous(), up.contiguous());
  }
  return Activation::of(gate).mul_(up);
}

// Returns (grad_gate, grad_up).
template <class Activation>
GatePair gated_backward_of(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  if (runs_gate_loop(gate, up) && runs_gate_loop(gate, grad)) {
    return elementwise_kernels(gate.device())
        .gate_backward(Activation::kGate, grad.contiguous(), gate.contiguous(), up.contiguous());
  }
  return {Activation::derivative(grad * up, gate), Activation::of(gate).mul_(grad)};
}

template <class Activation>
constexpr Operation<&gated_of<Activation>> call_gated{Activation::kName};

template <class Activation>
constexpr Operation<&gated_backward_of<Activation>> call_gated_backward{Activation::kBackward};

template <class Activation>
struct Gated : torch::autograd::Function<Gated<Activation>> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({gate, up});
    return call_gated<Activation>(gate, up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(2);
    const auto saved = ctx->get_saved_variables();
    const auto [grad_gate, grad_up] = call_gated_backward<Activation>(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

template <class Activation>
at::Tensor differentiable_gated(const at::Tensor& gate, const at::Tensor& up) {
  return Gated<Activation>::apply(gate, up);
}

// If autograd must record this backward for a double backward, differentiable operations compute the gradients;
// otherwise the kernel computes them.
template <class Activation>
GatePair differentiable_gated_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  if (torch::autograd::compute_requires_grad(grad, gate, up)) {
    return {Activation::differentiable_derivative(grad * up, gate), Activation::of(gate) * grad};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_gated_backward<Activation>(grad, gate, up);
}

// Any dim may be sharded, because the operation is elementwise. It is linear in one operand, which may be Partial: `up`
// in the forward, `grad` in the backward.
Rule gate_rule(int linear_in, size_t results) {
  return [linear_in, results](const OpCall& call, Proposal& proposal) {
    const auto& sizes = call.inputs[0].sizes;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      proposal.strategies.push_back(same_placement(call, Shard(static_cast<int64_t>(dim))));
    }
    add_partial_strategies(call, proposal, {linear_in});
    for (size_t i = 0; i < results; ++i) proposal.output(sizes);
  };
}

template <class Activation>
void define_gate(torch::Library& library, const char* schema, const char* backward_schema) {
  define_operation(library, schema, TORCH_FN(gated_of<Activation>), TORCH_FN(differentiable_gated<Activation>),
                   gate_rule(/*linear_in=*/1, 1));
  define_operation(library, backward_schema, TORCH_FN(gated_backward_of<Activation>),
                   TORCH_FN(differentiable_gated_backward<Activation>), gate_rule(/*linear_in=*/0, 2));
}

// Returns the RecomputeSource that recomputes the result of a Gated node from the node's saved gate and up. It is empty
// for a node of another operation.
template <class Activation>
RecomputedActivation::RecomputeSource source_of(torch::autograd::Node* node) {
  auto* const own = dynamic_cast<torch::autograd::CppNode<Gated<Activation>>*>(node);
  if (own == nullptr) return {};
  return RecomputedActivation::source(own->ctx_, [own] {
    const auto saved = own->ctx_.get_saved_variables();
    return call_gated<Activation>(saved[0], saved[1]);
  });
}

void check_gate(const char* name, const at::Tensor& gate, const at::Tensor& up) {
  TESSERA_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(), ErrorKind::kShape,
                "[kernels.{}] found gate of {} elements of {}, up of {} elements of {}: wanted equal shapes and dtypes",
                name, gate.numel(), c10::toString(gate.scalar_type()), up.numel(), c10::toString(up.scalar_type()));
}

}  // namespace

RecomputedActivation::RecomputeSource recompute_source_of_gated(torch::autograd::Node* node) {
  auto source = source_of<SiluGate>(node);
  return source.make ? source : source_of<GeluTanhGate>(node);
}

void define_gated(torch::Library& library) {
  define_gate<SiluGate>(library, "swiglu(Tensor gate, Tensor up) -> Tensor",
                        "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  define_gate<GeluTanhGate>(library, "geglu(Tensor gate, Tensor up) -> Tensor",
                            "geglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  check_gate("swiglu", gate, up);
  return call_gated<SiluGate>(gate, up);
}

at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) {
  check_gate("geglu", gate, up);
  return call_gated<GeluTanhGate>(gate, up);
}

}  // namespace tessera::kernels
