#include "tessera/kernels/rms_norm.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // a thread's least share of work

int64_t grain_rows(int64_t width) { return std::max<int64_t>(1, kGrainElements / width); }

bool runs_as_loop(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && weight.is_cpu() && weight.scalar_type() == at::kFloat &&
         x.numel() > 0;
}

// y = x * inverse_rms * weight, row by row.
std::pair<at::Tensor, at::Tensor> forward_loop(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  auto y = at::empty_like(x);
  auto inverse_rms = at::empty({rows}, x.options());
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

// With n = x * inverse_rms: grad_x = inverse_rms * (g w - n mean(g w n)), grad_weight = sum over rows of g n. The sum over
// rows is taken in blocks of fixed size, so that it does not depend on the number of threads.
std::pair<at::Tensor, at::Tensor> backward_loop(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
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
      const float pull = dot * scale * scale / static_cast<float>(width);
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) {
        to[i] = scale * (g_row[i] * w[i] - x_row[i] * pull);
        sum[i] += g_row[i] * x_row[i] * scale;
      }
    }
  });
  return {grad_x, partial.sum(0)};
}

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x_given, const at::Tensor& weight,
                            double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto x = x_given.contiguous();
    at::Tensor y, inverse_rms;
    if (runs_as_loop(x, weight)) {
      std::tie(y, inverse_rms) = forward_loop(x, weight.contiguous(), eps);
    } else {
      const auto wide = x.to(at::kFloat);
      inverse_rms = wide.square().mean(-1, true).add_(eps).rsqrt_();
      y = weight * wide.mul(inverse_rms).to(x.scalar_type());
    }
    ctx->save_for_backward({x, weight, inverse_rms});
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &inverse_rms = saved[2];
    if (runs_as_loop(x, weight) && grads[0].scalar_type() == at::kFloat) {
      auto [grad_x, grad_weight] = backward_loop(grads[0].contiguous(), x, weight.contiguous(), inverse_rms);
      return {grad_x, grad_weight, at::Tensor()};
    }
    const auto normed = x.to(at::kFloat).mul(inverse_rms);
    const auto grad = grads[0].to(at::kFloat);
    const auto scaled = grad * weight.to(at::kFloat);
    const auto grad_x = inverse_rms * (scaled - normed * (scaled * normed).mean(-1, true));
    const auto grad_weight = (grad * normed).reshape({-1, x.size(-1)}).sum(0);
    return {grad_x.to(x.scalar_type()), grad_weight.to(weight.scalar_type()), at::Tensor()};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  TESSERA_CHECK(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0), ErrorKind::kShape,
                "[kernels.rms_norm] input: found last dim {}, wanted the weight's {}", x.dim() ? x.size(-1) : 0,
                weight.numel());
  if (is_dtensor(x) || is_dtensor(weight)) {
    const auto wide = x.to(at::kFloat);
    const auto normed = wide * at::rsqrt(wide.square().mean(-1, true) + eps);
    return weight * normed.to(x.scalar_type());
  }
  return RmsNorm::apply(x, weight, eps);
}

}  // namespace tessera
