#include "tessera/kernels/swiglu.h"

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/kernels/detail/operations.h"

namespace tessera {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

at::Tensor swiglu_of(const at::Tensor& gate, const at::Tensor& up) { return at::silu(gate).mul_(up); }

// (grad_gate, grad_up)
Pair swiglu_backward_of(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  return {at::silu_backward(grad * up, gate), at::silu(gate).mul_(grad)};
}

at::Tensor call_swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = detail::operation<at::Tensor(const at::Tensor&, const at::Tensor&)>("tessera::swiglu");
  return op.call(gate, up);
}

Pair call_backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  static const auto op =
      detail::operation<Pair(const at::Tensor&, const at::Tensor&, const at::Tensor&)>("tessera::swiglu_backward");
  return op.call(grad, gate, up);
}

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, up});
    return call_swiglu(gate, up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [grad_gate, grad_up] = call_backward(grads[0], saved[0], saved[1]);
    return {grad_gate, grad_up};
  }
};

at::Tensor differentiable_swiglu(const at::Tensor& gate, const at::Tensor& up) { return SwiGlu::apply(gate, up); }

// Element by element; linear in one operand: in `up` forward, in `grad` backward.
Rule elementwise(int linear_in, size_t results) {
  return [linear_in, results](const OpCall& call, Proposal& proposal) {
    const auto& sizes = call.inputs[0].sizes;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      proposal.strategies.push_back(detail::alike(call, Shard(static_cast<int64_t>(dim))));
    }
    detail::add_partial_of(call, proposal, {linear_in});
    for (size_t i = 0; i < results; ++i) proposal.output(sizes);
  };
}

}  // namespace

namespace detail {

void define_swiglu(torch::Library& library) {
  library.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  library.impl("swiglu", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(swiglu_of)));
  library.impl("swiglu", torch::dispatch(c10::DispatchKey::Autograd, TORCH_FN(differentiable_swiglu)));
  library.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.impl("swiglu_backward",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(swiglu_backward_of)));
  has_no_derivative(library, "swiglu_backward");
}

void register_swiglu_rules() {
  register_rule("tessera::swiglu", elementwise(/*linear_in=*/1, 1));
  register_rule("tessera::swiglu_backward", elementwise(/*linear_in=*/0, 2));
}

}  // namespace detail

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TESSERA_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(), ErrorKind::kShape,
                "[kernels.swiglu] gate has {} elements of {}, up {} of {}: wanted equal shapes and dtypes",
                gate.numel(), c10::toString(gate.scalar_type()), up.numel(), c10::toString(up.scalar_type()));
  return call_swiglu(gate, up);
}

}  // namespace tessera
