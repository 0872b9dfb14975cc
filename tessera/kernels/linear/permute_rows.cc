#include "tessera/kernels/linear/permute_rows.h"

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"

namespace tessera::kernels {
namespace {

// The backward gathers with the inverse permutation, then sums the `copies` gradients of each row. Every gradient row
// is written once, without atomic additions.
struct PermuteRows : torch::autograd::Function<PermuteRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& order,
                            const at::Tensor& inverse, int64_t copies) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({inverse});
    ctx->saved_data["copies"] = copies;
    return x.index_select(0, copies == 1 ? order : order.div(copies, "floor"));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(4);
    const int64_t copies = ctx->saved_data["copies"].toInt();
    const auto inverse = ctx->get_saved_variables()[0];
    auto grad = grads[0].index_select(0, inverse);
    if (copies > 1) grad = grad.view({grad.size(0) / copies, copies, grad.size(1)}).sum(1);
    return {grad, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor inverse_permutation(const at::Tensor& order) {
  const at::NoGradGuard no_grad;
  auto inverse = at::empty_like(order);
  return inverse.scatter_(0, order, at::arange(order.size(0), order.options()));
}

at::Tensor permute_rows(const at::Tensor& x, const at::Tensor& order, const at::Tensor& inverse, int64_t copies) {
  TESSERA_CHECK(x.dim() == 2 && copies > 0 && order.dim() == 1 && order.size(0) == x.size(0) * copies &&
                    inverse.sizes() == order.sizes(),
                ErrorKind::kShape,
                "[kernels.permute_rows] {} rows, {} copies each: found an order of {} elements and an inverse of {}, "
                "wanted rows * copies elements in both",
                x.dim() > 0 ? x.size(0) : 0, copies, order.numel(), inverse.numel());
  return PermuteRows::apply(x, order, inverse, copies);
}

}  // namespace tessera::kernels
