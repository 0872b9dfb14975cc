#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/linear/quantized_weight.h"

namespace tessera::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns how many elements of the weight are decoded at once. As float32 these are 4 MiB on the CPU, which stay in the
// cache, and 16 MiB on other devices, where decoding costs several kernel launches.
int64_t decoded_elements(const QuantizedWeight& weight) {
  return weight.device().is_cpu() ? int64_t{1} << 20 : int64_t{1} << 22;
}

// Returns x weight^T; with `transposed`, x weight for x [..., out]. The weight is decoded some rows at a time.
at::Tensor product_with(const at::Tensor& x, const QuantizedWeight& weight, bool transposed) {
  const c10::NoGradGuard no_grad;
  const int64_t width = x.size(-1);
  const int64_t step = std::max<int64_t>(1, decoded_elements(weight) / std::max<int64_t>(weight.in(), 1));
  const auto flat = x.detach().reshape({width == 0 ? 0 : x.numel() / width, width});
  // With `transposed`, y is the sum of one product for each group of decoded rows. The sum is computed in float32
  // (float64 for a float64 x), because a single product also sums in float32.
  auto y = transposed ? at::zeros({flat.size(0), weight.in()},
                                  x.options().dtype(at::promote_types(x.scalar_type(), at::kFloat)))
                      : at::empty({flat.size(0), weight.out()}, x.options());
  for (int64_t first = 0; first < weight.out(); first += step) {
    const int64_t count = std::min(step, weight.out() - first);
    const auto rows = weight.rows(first, count).to(x.scalar_type());
    if (transposed) {
      y.add_(product_nt(flat.narrow(1, first, count), rows.t()));
    } else {
      y.narrow(1, first, count).copy_(product_nt(flat, rows));
    }
  }
  return y.to(x.scalar_type()).view(with_last(x.sizes(), transposed ? weight.in() : weight.out()));
}

// product_with() is linear in x, so the gradient of x is another call of product_with(), with the opposite value of
// `transposed`.
struct QuantizedProduct : torch::autograd::Function<QuantizedProduct> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const QuantizedWeight& weight, bool transposed) {
    ctx->saved_data["transposed"] = transposed;
    // The saved copy of `weight` shares its packed bytes, which never change.
    ctx->saved_data["weight"] = make_saved_value(weight);
    return product_with(x, weight, transposed);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto& weight = saved_value<QuantizedWeight>(ctx->saved_data["weight"]);
    return {QuantizedProduct::apply(gradients[0], weight, !ctx->saved_data["transposed"].toBool()), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor quantized_linear(const at::Tensor& x, const QuantizedWeight& weight, const at::Tensor& bias) {
  TESSERA_CHECK(weight.defined(), ErrorKind::kConfig,
                "[kernels.quantized_linear] the weight has no values yet. Load the model first.");
  const bool plain = !is_dtensor(x) && (!bias.defined() || !is_dtensor(bias));
  TESSERA_CHECK(plain && x.device() == weight.device(), ErrorKind::kConfig,
                "[kernels.quantized_linear] found {}, wanted plain tensors on {}, where the packed weight is. {}",
                plain ? "x on " + x.device().str() : "a DTensor", weight.device().str(),
                plain ? "Move x or the weight." : "Call the layer (nn::QuantizedLinear), which uses this rank's part.");
  TESSERA_CHECK(x.dim() >= 1 && x.size(-1) == weight.in() && c10::isFloatingType(x.scalar_type()) &&
                    (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.out())),
                ErrorKind::kShape, "[kernels.quantized_linear] found x {} and bias {}, wanted [..., {}] and [{}]",
                c10::str(x.sizes()), bias.defined() ? c10::str(bias.sizes()) : "none", weight.in(), weight.out());
  const auto y = QuantizedProduct::apply(x, weight, false);
  return bias.defined() ? y + bias.to(y.scalar_type()) : y;
}

}  // namespace tessera::kernels
