// log_sigmoid as accelerators have it: the buffer that the CPU keeps for backward is empty there, and backward computes
// the values again.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/log_sigmoid_backward.h>
#include <ATen/ops/log_sigmoid_forward.h>
#include <torch/library.h>

#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

std::tuple<at::Tensor, at::Tensor> log_sigmoid_forward(const at::Tensor& self) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto output = at::empty_like(self);
  run_on("aten::log_sigmoid_forward", {self}, {output}, [self = host_view(self), output = host_view(output)] {
    at::Tensor(output).copy_(std::get<0>(at::log_sigmoid_forward(self)));
  });
  return {output, at::empty({0}, self.options())};
}

at::Tensor log_sigmoid_backward(const at::Tensor& grad_output, const at::Tensor& self, const at::Tensor& buffer) {
  TORCH_CHECK(buffer.numel() == 0, "[pretend] log_sigmoid_backward: a buffer of ", buffer.sizes(),
              " where accelerators keep none");
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto grad = at::empty_like(grad_output);
  run_on("aten::log_sigmoid_backward", {grad_output, self}, {grad},
         [grad_output = host_view(grad_output), self = host_view(self), grad = host_view(grad)] {
           const auto kept = std::get<1>(at::log_sigmoid_forward(self));
           at::Tensor(grad).copy_(at::log_sigmoid_backward(grad_output, self, kept));
         });
  return grad;
}

}  // namespace

void register_log_sigmoid() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("log_sigmoid_forward", TORCH_FN(log_sigmoid_forward));
  library.impl("log_sigmoid_backward", TORCH_FN(log_sigmoid_backward));
}

}  // namespace tessera::pretend
