#include "tessera/kernels/rows/rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_rms_norm_backward.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/kernels/autograd/recomputed_activation.h"
#include "tessera/kernels/dispatch/device_kernels.h"
#include "tessera/kernels/dispatch/operations.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/rows/elementwise_kernels.h"

namespace tessera::kernels {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

constexpr int64_t kGrainElements = 1 << 14;  // least work of a thread

int64_t grain_rows(int64_t width) { return std::max<int64_t>(1, kGrainElements / width); }

bool runs_as_loop(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && weight.is_cpu() && weight.scalar_type() == at::kFloat &&
         x.numel() > 0;
}

// Returns y = x * inverse_rms * weight and inverse_rms, by a loop over the rows.
Pair forward_loop(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  auto y = at::empty_like(x);
  auto inverse_rms = at::empty(with_last(x.sizes(), 1), x.options());
  const float *in = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float *out = y.mutable_data_ptr<float>(), *inverse = inverse_rms.mutable_data_ptr<float>();
  at::parallel_for(0, rows, grain_rows(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = in + row * width;
      float* to = out + row * width;
      float squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < width; ++i) squares += from[i] * from[i];
      const float scale = 1.0F / std::sqrt(squares / static_cast<float>(width) + static_cast<float>(eps));
      inverse[row] = scale;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[i] = w[i] * (from[i] * scale);
    }
  });
  return {y, inverse_rms};
}

// With g = grad, w = weight and n = x * inverse_rms: grad_x = inverse_rms * (g w - n mean(g w n)); grad_weight = sum
// over rows of g n. Each block of rows has its own partial sum. Blocks have a fixed size, so the result does not depend
// on the number of threads.
Pair backward_loop(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                   const at::Tensor& inverse_rms) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const int64_t block = std::max(grain_rows(width), (rows + 63) / 64), blocks = (rows + block - 1) / block;
  auto grad_x = at::empty_like(x);
  auto partial = at::zeros({blocks, width}, x.options());
  const float *g = grad.const_data_ptr<float>(), *in = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  const float* inverse = inverse_rms.const_data_ptr<float>();
  float *out = grad_x.mutable_data_ptr<float>(), *sums = partial.mutable_data_ptr<float>();
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * block; row < std::min(rows, end * block); ++row) {
      const float *g_row = g + row * width, *x_row = in + row * width, scale = inverse[row];
      float *to = out + row * width, *sum = sums + row / block * width;
      float dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < width; ++i) dot += g_row[i] * w[i] * x_row[i];
      const float mean_gradient = dot * scale * scale / static_cast<float>(width);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        to[i] = scale * (g_row[i] * w[i] - x_row[i] * mean_gradient);
        sum[i] += g_row[i] * x_row[i] * scale;
      }
    }
  });
  return {grad_x, partial.sum(0)};
}

// Returns the factors by which the normed rows are multiplied: weight, or 1 + weight.
at::Tensor factors_of(const at::Tensor& weight, bool one_plus) { return one_plus ? weight + 1 : weight.contiguous(); }

bool has_vector_loops(const at::Tensor& x, const at::Tensor& weight) {
  return supports_elementwise_kernels(x, /*lanes=*/16) && weight.device() == x.device() &&
         weight.scalar_type() == x.scalar_type();
}

// Returns the factors by which the normed rows are multiplied (weight, or 1 + weight) as a contiguous fp32 tensor. The
// weight is converted to fp32 before 1 is added, so that the sum is not rounded to 16 bits.
at::Tensor wide_factors(const at::Tensor& weight, bool one_plus) {
  return factors_of(weight.to(at::kFloat), one_plus).contiguous();
}

// Returns whether libtorch's own kernels run (CUDA, XPU). They need a weight of the dtype of x. With one_plus they do
// not run in 16 bits, because 1 + weight would be rounded to 16 bits.
bool runs_fused(const at::Tensor& x, const at::Tensor& weight, bool one_plus) {
  if (x.is_cpu() || x.is_meta() || x.numel() == 0 || weight.scalar_type() != x.scalar_type()) return false;
  if (one_plus && x.element_size() < 4) return false;
  static const DeviceKernels fused{"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"};
  return fused.are_registered_for(x.device());
}

// Returns y and inverse_rms [..., 1]. Tries in this order: libtorch's fused kernel; Tessera's loops of this device; the
// OpenMP loop for fp32 on a CPU; plain operations.
Pair rms_norm_of(const at::Tensor& input, const at::Tensor& weight, double eps, bool one_plus) {
  const auto x = input.contiguous();
  if (runs_fused(x, weight, one_plus)) return at::_fused_rms_norm(x, weight.sizes(), factors_of(weight, one_plus), eps);
  if (has_vector_loops(x, weight)) {
    return elementwise_kernels(x.device()).rms_norm(x, wide_factors(weight, one_plus), eps, /*rounds_first=*/!one_plus);
  }
  if (runs_as_loop(x, weight)) return forward_loop(x, factors_of(weight, one_plus), eps);
  const auto wide = x.to(wide_type(x.scalar_type()));
  const auto inverse_rms = wide.square().mean(-1, true).add_(eps).rsqrt_();
  const auto normed = wide.mul(inverse_rms);
  if (!one_plus) return {weight * normed.to(x.scalar_type()), inverse_rms};
  return {normed.mul(weight.to(wide.scalar_type()) + 1).to(x.scalar_type()), inverse_rms};
}

// Returns grad_x and grad_weight, computed by differentiable operations.
Pair gradients_by_operations(const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& inverse_rms, bool one_plus) {
  const auto wide = wide_type(x.scalar_type());
  const auto normed = x.to(wide).mul(inverse_rms);
  const auto grad = grad_y.to(wide);
  const auto scaled = grad * factors_of(weight.to(wide), one_plus);
  const auto grad_x = inverse_rms * (scaled - normed * (scaled * normed).mean(-1, true));
  auto grad_weight = grad * normed;
  if (x.dim() > 1) grad_weight = grad_weight.flatten(0, -2).sum(0);
  return {grad_x.to(x.scalar_type()), grad_weight.to(weight.scalar_type())};
}

// Returns grad_x and grad_weight.
Pair rms_norm_backward_of(const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& weight,
                          const at::Tensor& inverse_rms, bool one_plus) {
  if (runs_fused(x, weight, one_plus) && grad_y.scalar_type() == x.scalar_type()) {
    return at::_fused_rms_norm_backward(grad_y.contiguous(), x.contiguous(), weight.sizes(), inverse_rms.contiguous(),
                                        factors_of(weight, one_plus), {true, true});
  }
  if (has_vector_loops(x, weight) && grad_y.scalar_type() == x.scalar_type()) {
    const auto [grad_x, grad_weight] = elementwise_kernels(x.device())
                                           .rms_norm_backward(grad_y.contiguous(), x.contiguous(),
                                                              wide_factors(weight, one_plus), inverse_rms.contiguous());
    return {grad_x, grad_weight.to(weight.scalar_type())};
  }
  if (runs_as_loop(x, weight) && grad_y.scalar_type() == at::kFloat) {
    return backward_loop(grad_y.contiguous(), x.contiguous(), factors_of(weight, one_plus), inverse_rms.contiguous());
  }
  return gradients_by_operations(grad_y, x, weight, inverse_rms, one_plus);
}

constexpr Operation<&rms_norm_of> call_rms_norm{"tessera::rms_norm"};
constexpr Operation<&rms_norm_backward_of> call_rms_norm_backward{"tessera::rms_norm_backward"};

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                                const at::Tensor& weight, double eps, bool one_plus) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, inverse_rms] = call_rms_norm(x, weight, eps, one_plus);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, inverse_rms});
    ctx->saved_data["one_plus"] = one_plus;
    ctx->saved_data["eps"] = eps;
    ctx->mark_non_differentiable({inverse_rms});
    return {y, inverse_rms};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(4);
    const auto saved = ctx->get_saved_variables();
    const bool one_plus = ctx->saved_data["one_plus"].toBool();
    const auto [grad_x, grad_weight] = call_rms_norm_backward(grads[0], saved[0], saved[1], saved[2], one_plus);
    return {grad_x, grad_weight, at::Tensor(), at::Tensor()};
  }
};

// If grad, x or weight requires a gradient (in a double backward), recomputes inverse_rms from x and computes the
// gradients by differentiable operations; otherwise runs the kernel.
Pair differentiable_rms_norm_backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                                      const at::Tensor& inverse_rms, bool one_plus) {
  if (!torch::autograd::compute_requires_grad(grad, x, weight)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_rms_norm_backward(grad, x, weight, inverse_rms, one_plus);
  }
  const auto square = x.to(wide_type(x.scalar_type())).square().mean(-1, true);
  const auto eps = inverse_rms.detach().pow(-2) - square.detach();  // recovered from inverse_rms = (square + eps)^-1/2
  return gradients_by_operations(grad, x, weight, (square + eps).rsqrt(), one_plus);
}

Pair differentiable_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool one_plus) {
  const auto results = RmsNorm::apply(x, weight, eps, one_plus);
  return {results[0], results[1]};
}

// x [..., d], weight [d] -> y, inverse_rms. All dims but the last may be sharded.
void propose_rms_norm(const OpCall& call, Proposal& proposal) {
  const auto& x = call.inputs[0];
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
    proposal.strategies.push_back({{Shard(dim), Shard(dim)}, {Shard(dim), Replicate()}});
  }
  proposal.output(x.sizes);
  proposal.output(with_last(x.sizes, 1));
}

// grad, x, weight, inverse_rms -> grad_x, grad_weight. Linear in grad; sharded rows make grad_weight Partial.
void propose_rms_norm_backward(const OpCall& call, Proposal& proposal) {
  const auto& x = call.inputs[1];
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
    proposal.strategies.push_back({{Shard(dim), Partial()}, {Shard(dim), Shard(dim), Replicate(), Shard(dim)}});
  }
  add_partial_strategies(call, proposal, {0});
  proposal.output(x.sizes);
  proposal.output(call.inputs[2].sizes);
}

}  // namespace

RecomputedActivation::RecomputeSource recompute_source_of_rms_norm(torch::autograd::Node* node) {
  auto* const own = dynamic_cast<torch::autograd::CppNode<RmsNorm>*>(node);
  if (own == nullptr) return {};
  auto source = RecomputedActivation::source(own->ctx_, [own] {
    const auto saved = own->ctx_.get_saved_variables();
    const auto& data = own->ctx_.saved_data;
    return std::get<0>(call_rms_norm(saved[0], saved[1], data.at("eps").toDouble(), data.at("one_plus").toBool()));
  });
  source.parameter = own->ctx_.get_saved_variables()[1];
  return source;
}

void define_rms_norm(torch::Library& library) {
  define_operation(library, "rms_norm(Tensor x, Tensor weight, float eps, bool one_plus=False) -> (Tensor, Tensor)",
                   TORCH_FN(rms_norm_of), TORCH_FN(differentiable_rms_norm), propose_rms_norm);
  define_operation(library,
                   "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse_rms, bool one_plus=False) "
                   "-> (Tensor, Tensor)",
                   TORCH_FN(rms_norm_backward_of), TORCH_FN(differentiable_rms_norm_backward),
                   propose_rms_norm_backward);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool one_plus) {
  TESSERA_CHECK(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0), ErrorKind::kShape,
                "[kernels.rms_norm] input: found last dim {}, wanted the weight's {}", x.dim() ? x.size(-1) : 0,
                weight.numel());
  return std::get<0>(call_rms_norm(x, weight, eps, one_plus));
}

}  // namespace tessera::kernels
