#include "tessera/kernels/attention/checkpointed_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/attention/head_groups.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"

namespace tessera::kernels {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Autograd function of attention whose output and log-sum-exp are already computed.
struct CheckpointedAttentionFunction : torch::autograd::Function<CheckpointedAttentionFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& output, const at::Tensor& log_sums,
                            const OptionalTensor& mask, bool causal, std::optional<double> scale) {
    const auto result = output.detach();
    ctx->save_for_backward({q, k, v, result, log_sums, mask.value_or(at::Tensor())});
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["scale"] = scale;
    return result;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto mask = saved[5].defined() ? OptionalTensor(saved[5]) : std::nullopt;
    const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], /*dropout_p=*/0.0,
        ctx->saved_data["causal"].toBool(), mask, ctx->saved_data["scale"].toOptional<double>());
    return {q, k, v, {}, {}, {}, {}, {}};
  }
};

}  // namespace

bool caches_attention(const at::Tensor& q) {
  return ActivationCheckpointCache::current() != nullptr && q.is_cpu() && !is_dtensor(q);
}

at::Tensor checkpointed_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const CheckpointedAttentionOptions& options) {
  const auto keys = repeat_heads(k, /*dim=*/1, q.size(1)), values = repeat_heads(v, /*dim=*/1, q.size(1));
  const auto known = ActivationCheckpointCache::cached_or_computed([&] {
    const auto [output, log_sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, /*dropout_p=*/0.0, options.causal, options.mask, options.scale);
    return std::vector<at::Tensor>{output, log_sums};
  });
  return CheckpointedAttentionFunction::apply(q, keys, values, known.at(0), known.at(1), options.mask, options.causal,
                                              options.scale);
}

}  // namespace tessera::kernels
