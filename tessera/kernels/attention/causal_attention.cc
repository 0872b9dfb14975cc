#include "tessera/kernels/attention/causal_attention.h"

#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/products/attention.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/kernels/attention/attention_loops.h"
#include "tessera/kernels/attention/head_groups.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tessera/kernels/dispatch/operations.h"
#include "tessera/kernels/dispatch/result_form.h"

namespace tessera::kernels {
namespace {

using FirstKey = std::optional<at::Tensor>;
using AttentionResult = std::tuple<at::Tensor, at::Tensor>;
using AttentionGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

bool supports_attention_loops(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto type = q.scalar_type();
  return q.is_cpu() && (type == at::kFloat || type == at::kBFloat16) && k.scalar_type() == type &&
         v.scalar_type() == type && q.size(3) % 16 == 0 && q.size(3) <= 256 && q.numel() > 0 &&
         k.sizes() == v.sizes() && k.size(2) == q.size(2) && has_attention_loops();
}

at::Tensor dense_first_key(const FirstKey& first_key) {
  return first_key && first_key->defined() ? first_key->clamp_min(0).contiguous() : at::Tensor();
}

// ---- fallback by tensor operations ----

// Returns bool [B or 1, 1, T, T]: true where a query sees a key.
at::Tensor seen_keys(const at::Tensor& q, const at::Tensor& first_key) {
  const auto position = at::arange(q.size(2), q.options().dtype(at::kLong));
  const auto causal = position.unsqueeze(0).le(position.unsqueeze(1)).view({1, 1, q.size(2), q.size(2)});
  return first_key.defined() ? causal.logical_and(position.ge(first_key.to(q.device()).unsqueeze(2)).unsqueeze(1))
                             : causal;
}

// Converts [B, H, T, d] to `type`, with the memory layout [B, T, H, d].
at::Tensor with_tokens_outside(const at::Tensor& heads, at::ScalarType type) {
  return heads.to(type).transpose(1, 2).contiguous().transpose(1, 2);
}

AttentionResult attention_by_formula(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const at::Tensor& first_key, double scale) {
  const auto wide = wide_type(q.scalar_type());
  // The fallback where the blocked loops do not run: plain tensor operations with all scores [B, H, T, T] in memory.
  const auto keys = repeat_heads(k, /*dim=*/1, q.size(1)).to(wide),
             values = repeat_heads(v, /*dim=*/1, q.size(1)).to(wide);
  const auto seen = seen_keys(q, first_key);
  const auto scores = q.to(wide)
                          .matmul(keys.transpose(2, 3))
                          .mul(scale)
                          .masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  // A query that sees no key has a log-sum-exp of -infinity. Replacing it by 0 makes the query's weights and result 0.
  const auto any = seen.any(-1);
  const auto log_sums = at::where(any, scores.logsumexp(-1), 0.0);
  const auto probs = (scores - log_sums.unsqueeze(3)).exp();
  return {with_tokens_outside(probs.matmul(values), q.scalar_type()), log_sums};
}

// With the weights P = exp(scores - log sums) (`probs`) and dP = dO V^T (`grad_probs`): dS = P (dP - sum(P dP)) scale,
// dQ = dS K, dK = dS^T Q, dV = P^T dO. Gradients of shared keys and values are summed over their group of heads.
AttentionGradients gradients_by_formula(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const at::Tensor& log_sums, const at::Tensor& first_key,
                                        double scale) {
  const auto wide = wide_type(q.scalar_type());
  const auto keys = repeat_heads(k, /*dim=*/1, q.size(1)).to(wide),
             values = repeat_heads(v, /*dim=*/1, q.size(1)).to(wide);
  const auto queries = q.to(wide), g = grad.to(wide);
  const auto probs = (queries.matmul(keys.transpose(2, 3)).mul(scale) - log_sums.unsqueeze(3))
                         .exp()
                         .masked_fill(seen_keys(q, first_key).logical_not(), 0.0);
  const auto grad_probs = g.matmul(values.transpose(2, 3));
  const auto of_scores = probs * (grad_probs - (probs * grad_probs).sum(-1, true)) * scale;
  return {
      with_tokens_outside(of_scores.matmul(keys), q.scalar_type()),
      with_tokens_outside(sum_heads(of_scores.transpose(2, 3).matmul(queries), /*dim=*/1, k.size(1)), k.scalar_type()),
      with_tokens_outside(sum_heads(probs.transpose(2, 3).matmul(g), /*dim=*/1, v.size(1)), v.scalar_type())};
}

// ---- the operations tessera::causal_attention and tessera::causal_attention_backward ----

AttentionResult causal_attention_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const FirstKey& first_key, double scale) {
  const auto first = dense_first_key(first_key);
  if (supports_attention_loops(q, k, v)) return attention_forward_loops({q, k, v, first, scale});
  return attention_by_formula(q, k, v, first, scale);
}

AttentionGradients causal_attention_backward_of(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v, const at::Tensor& log_sums,
                                                const FirstKey& first_key, double scale) {
  const auto first = dense_first_key(first_key);
  if (supports_attention_loops(q, k, v) && grad.scalar_type() == q.scalar_type()) {
    return attention_backward_loops({q, k, v, first, scale}, grad, log_sums.contiguous());
  }
  return gradients_by_formula(grad, q, k, v, log_sums, first, scale);
}

constexpr Operation<&causal_attention_of> call_causal_attention{"tessera::causal_attention"};
constexpr Operation<&causal_attention_backward_of> call_causal_attention_backward{"tessera::causal_attention_backward"};

// The autograd node of causal attention. known_result and known_log_sums: the outputs, if they are already computed.
struct CausalAttentionNode : torch::autograd::Function<CausalAttentionNode> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v, const FirstKey& first_key,
                                                double scale, const FirstKey& known_result,
                                                const FirstKey& known_log_sums) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [result, log_sums] = known_result ? AttentionResult{known_result->detach(), known_log_sums->detach()}
                                           : call_causal_attention(q, k, v, first_key, scale);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({q, k, v, log_sums, first_key.value_or(at::Tensor())});
    ctx->saved_data["scale"] = scale;
    ctx->mark_non_differentiable({log_sums});
    return {result, log_sums};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(7);
    const auto saved = ctx->get_saved_variables();
    const auto first_key = saved[4].defined() ? FirstKey(saved[4]) : std::nullopt;
    const auto [q, k, v] = call_causal_attention_backward(grads[0], saved[0], saved[1], saved[2], saved[3], first_key,
                                                          ctx->saved_data["scale"].toDouble());
    return {q, k, v, {}, {}, {}, {}};
  }
};

AttentionResult differentiable_causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                const FirstKey& first_key, double scale) {
  const auto results = CausalAttentionNode::apply(q, k, v, first_key, scale, std::nullopt, std::nullopt);
  return {results[0], results[1]};
}

// ---- sharding ----

// Returns the shape of an output [B, H, T, d] with the memory layout [B, T, H, d].
OutputShape tokens_outside(const std::vector<int64_t>& sizes) {
  const int64_t d = sizes.back();
  return {sizes, {sizes[1] * sizes[2] * d, d, sizes[1] * d, 1}};
}

// The batch dim may be sharded. The dim of heads may be sharded, together with the groups of k and v; first_key [B, T]
// has no such dim and is then replicated.
void propose_attention_cuts(const OpCall& call, Proposal& proposal, size_t outputs) {
  const int first_key = call.input_at(call.arg_named("first_key"));
  const int64_t dims[] = {0, 1};
  const auto add = [&](int64_t dim) {
    Strategy strategy;
    for (size_t i = 0; i < outputs; ++i) strategy.outputs.push_back(Shard(dim));
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      const bool whole = static_cast<int>(i) == first_key && dim == 1;
      strategy.inputs.push_back(whole ? Placement(Replicate()) : Placement(Shard(dim)));
    }
    proposal.strategies.push_back(std::move(strategy));
  };
  const auto& query = call.inputs[static_cast<size_t>(call.input_at(call.arg_named("query")))];
  const auto& key = call.inputs[static_cast<size_t>(call.input_at(call.arg_named("key")))];
  proposal.supports_strided = query.sizes[1] == key.sizes[1];
  propose_shards(call, proposal, dims, add);
}

void propose_causal_attention(const OpCall& call, Proposal& proposal) {
  propose_attention_cuts(call, proposal, 2);
  const auto sizes = call.inputs[0].sizes.vec();
  proposal.outputs.push_back(tokens_outside(sizes));
  proposal.output({sizes[0], sizes[1], sizes[2]});
}

void propose_causal_attention_backward(const OpCall& call, Proposal& proposal) {
  propose_attention_cuts(call, proposal, 3);
  for (const size_t input : {1, 2, 3}) proposal.outputs.push_back(tokens_outside(call.inputs[input].sizes.vec()));
}

}  // namespace

void define_causal_attention(torch::Library& library) {
  define_operation(
      library,
      "causal_attention(Tensor query, Tensor key, Tensor value, Tensor? first_key, float scale) -> (Tensor, Tensor)",
      TORCH_FN(causal_attention_of), TORCH_FN(differentiable_causal_attention), propose_causal_attention);
  define_operation(library,
                   "causal_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor log_sums, "
                   "Tensor? first_key, float scale) -> (Tensor, Tensor, Tensor)",
                   TORCH_FN(causal_attention_backward_of), no_derivative(), propose_causal_attention_backward);
}

bool supports_causal_attention_loops(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return is_dtensor(q) == is_dtensor(k) && is_dtensor(q) == is_dtensor(v) &&
         supports_attention_loops(local_tensor_of(q), local_tensor_of(k), local_tensor_of(v));
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const CausalAttentionOptions& options) {
  TESSERA_CHECK(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) && k.size(1) > 0 &&
                    q.size(1) % k.size(1) == 0 && q.size(2) == k.size(2) && q.size(3) == k.size(3),
                ErrorKind::kShape,
                "[kernels.attention] found q of {} dims, k of {}: wanted q [B, H, T, d], k and v [B, G, T, d] with H a "
                "multiple of G",
                q.dim(), k.dim());
  FirstKey first_key;
  if (options.first_key.defined()) {
    const auto& first_keys = options.first_key;
    TESSERA_CHECK(first_keys.scalar_type() == at::kLong && first_keys.dim() == 2 && first_keys.size(0) == q.size(0) &&
                      first_keys.size(1) == q.size(2) && !is_dtensor(first_keys),
                  ErrorKind::kShape, "[kernels.attention] first_key: found {} elements of {}, wanted int64 [{}, {}]",
                  first_keys.numel(), c10::toString(first_keys.scalar_type()), q.size(0), q.size(2));
    first_key = replicate_like(first_keys, q);
  }
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))));
  // Under selective activation checkpointing the result is computed outside of autograd, or is the result that the
  // first forward kept. CausalAttentionNode then adds the derivative.
  const bool keeps = ActivationCheckpointCache::current() != nullptr && !is_dtensor(q);
  if (!keeps) return std::get<0>(call_causal_attention(q, k, v, first_key, scale));
  const auto known = ActivationCheckpointCache::cached_or_computed([&] {
    const auto [result, log_sums] = call_causal_attention(q, k, v, first_key, scale);
    return std::vector<at::Tensor>{result, log_sums};
  });
  return CausalAttentionNode::apply(q, k, v, first_key, scale, FirstKey(known.at(0)), FirstKey(known.at(1)))[0];
}

}  // namespace tessera::kernels
