#include "tessera/kernels/swiglu.h"

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {
namespace {

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& up) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, up});
    return at::silu(gate).mul_(up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &gate = saved[0], &up = saved[1];
    auto grad_up = at::silu(gate).mul_(grads[0]);
    auto grad_gate = at::silu_backward(grads[0] * up, gate);
    return {grad_gate, grad_up};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  TESSERA_CHECK(gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(), ErrorKind::kShape,
                "[kernels.swiglu] gate has {} elements of {}, up {} of {}: wanted equal shapes and dtypes", gate.numel(),
                c10::toString(gate.scalar_type()), up.numel(), c10::toString(up.scalar_type()));
  if (is_dtensor(gate) || is_dtensor(up)) return at::silu(gate) * up;
  return SwiGlu::apply(gate, up);
}

}  // namespace tessera
