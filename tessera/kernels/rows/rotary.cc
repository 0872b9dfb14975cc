#include "tessera/kernels/rows/rotary.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/kernels/dispatch/operations.h"
#include "tessera/kernels/rows/elementwise_kernels.h"

namespace tessera::kernels {
namespace {

// Rotates by libtorch's operations, on any device: multiplies both halves of a head by cos, then adds to each half the
// other half times sin, with opposite signs.
at::Tensor rotate_ops(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const auto halves = x.unflatten(-1, {2, x.size(-1) / 2});
  const auto s = sin.unsqueeze(2);
  auto y = at::empty(halves.sizes(), x.options().dtype(at::promote_types(x.scalar_type(), at::kFloat)));
  at::mul_out(y, halves, cos.unsqueeze(2).unsqueeze(3));
  y.select(3, 0).addcmul_(halves.select(3, 1), s, -sign);
  y.select(3, 1).addcmul_(halves.select(3, 0), s, sign);
  return y.flatten(3).to(x.scalar_type());
}

// Rotates by the angles of cos and sin; with sign -1, by the opposite angles.
at::Tensor rotate(const at::Tensor& input, const at::Tensor& cos, const at::Tensor& sin, float sign) {
  if (supports_elementwise_kernels(input, /*lanes=*/32) && cos.device() == input.device() &&
      sin.device() == input.device()) {
    return elementwise_kernels(input.device()).rotary(input.contiguous(), cos, sin, sign);
  }
  if (!input.is_cpu() || input.scalar_type() != at::kFloat) return rotate_ops(input, cos, sin, sign);
  const auto x = input.contiguous();
  auto y = at::empty_like(x);
  const int64_t length = x.size(1), heads = x.size(2), half = x.size(3) / 2;
  const int64_t batch_step = cos.size(0) == 1 ? 0 : length * half;
  const float *in = x.const_data_ptr<float>(), *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  float* out = y.mutable_data_ptr<float>();
  // This loop is for fp32 on a CPU where the vectorised loops do not run. batch_step is 0 where all batch rows share
  // the angles.
  at::parallel_for(0, x.size(0) * length, 16, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t angle = token / length * batch_step + token % length * half;
      for (int64_t head = 0; head < heads; ++head) {
        const float *low = in + (token * heads + head) * 2 * half, *high = low + half;
        float *to_low = out + (token * heads + head) * 2 * half, *to_high = to_low + half;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
          const float sine = sign * s[angle + i];
          to_low[i] = low[i] * c[angle + i] - high[i] * sine;
          to_high[i] = high[i] * c[angle + i] + low[i] * sine;
        }
      }
    }
  });
  return y;
}

at::Tensor rotary_of(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  return rotate(x, cos.contiguous(), sin.contiguous(), back ? -1 : 1);
}

constexpr Operation<&rotary_of> call_rotary{"tessera::rotary"};

struct Rotary : torch::autograd::Function<Rotary> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin, bool back) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({cos, sin});
    ctx->saved_data["back"] = back;
    return call_rotary(x, cos, sin, back);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(4);
    const auto saved = ctx->get_saved_variables();
    const bool back = ctx->saved_data["back"].toBool();
    return {call_rotary(grads[0], saved[0], saved[1], !back), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor differentiable_rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool back) {
  return Rotary::apply(x, cos, sin, back);
}

// x [B, T, H, d], cos and sin [B or 1, T, d/2]. Batch, tokens and heads may be sharded; linear in x.
void propose_rotary(const OpCall& call, Proposal& proposal) {
  const auto row = call.inputs[1].sizes[0] == 1 ? Replicate() : Shard(0);
  proposal.strategies.push_back({{Shard(0)}, {Shard(0), row, row}});
  proposal.strategies.push_back({{Shard(1)}, {Shard(1), Shard(1), Shard(1)}});
  proposal.strategies.push_back({{Shard(2)}, {Shard(2), Replicate(), Replicate()}});
  add_partial_strategies(call, proposal, {0});
  proposal.output(call.inputs[0].sizes);
}

}  // namespace

void define_rotary(torch::Library& library) {
  define_operation(library, "rotary(Tensor x, Tensor cos, Tensor sin, bool back=False) -> Tensor", TORCH_FN(rotary_of),
                   TORCH_FN(differentiable_rotary), propose_rotary);
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  TESSERA_CHECK(
      x.dim() == 4 && x.size(3) % 2 == 0 && cos.dim() == 3 && cos.sizes() == sin.sizes() &&
          cos.size(2) * 2 == x.size(3) && cos.size(1) == x.size(1) && (cos.size(0) == 1 || cos.size(0) == x.size(0)) &&
          cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat,
      ErrorKind::kShape,
      "[kernels.rotary] found x of {} dims and cos of {} dims, wanted x [B, T, H, d] and fp32 cos, sin [B, T, d/2]",
      x.dim(), cos.dim());
  return call_rotary(x, replicate_like(cos, x), replicate_like(sin, x), /*back=*/false);
}

}  // namespace tessera::kernels
