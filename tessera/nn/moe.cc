#include "tessera/nn/moe.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/gated.h"
#include "tessera/kernels/grouped_linear.h"
#include "tessera/kernels/linear.h"
#include "tessera/kernels/permute_rows.h"

namespace tessera::nn {
namespace {

at::Tensor part_here(const at::Tensor& weight) { return is_dtensor(weight) ? to_local(weight) : weight; }

// A weight that ranks with other tokens have, too.
at::Tensor shared_weight(const at::Tensor& weight, const MeshPtr& mesh) {
  if (mesh == nullptr) return part_here(weight);
  const auto everywhere = is_dtensor(weight) ? weight : from_local(weight, mesh, {Replicate()});
  return to_local(everywhere, Placements{Partial()});
}

}  // namespace

Router::Router(const MoEOptions& moe, const ParameterOptions& options)
    : chosen_(moe.chosen), normalise_(moe.normalise) {
  register_parameter("weight", weight, at::empty({moe.experts, moe.width}, options.tensor_options()));
}

Routing Router::forward(const at::Tensor& rows, const RealTokens& real) {
  const auto logits = tessera::linear(rows, shared_weight(weight, tokens_over));
  const auto wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto probabilities = at::softmax(logits, -1, wide);
  const bool counts = statistics && statistics->on();
  if (counts) probabilities = with_balance_gradient(probabilities, real.mask, statistics);
  auto [weights, experts] = at::topk(probabilities, chosen_, -1);
  if (counts) statistics->count(probabilities, experts, real.mask);
  if (normalise_) weights = weights / weights.sum(-1, /*keepdim=*/true);
  return {experts, weights.to(logits.scalar_type())};
}

Experts::Experts(const MoEOptions& moe, const ParameterOptions& options)
    : inner_(moe.inner), activation_(moe.activation) {
  register_parameter("gate_up_proj", gate_up_proj,
                     at::empty({moe.experts, 2 * moe.inner, moe.width}, options.tensor_options()));
  register_parameter("down_proj", down_proj, at::empty({moe.experts, moe.width, moe.inner}, options.tensor_options()));
}

at::Tensor Experts::forward(const at::Tensor& rows, const at::Tensor& counts) {
  const auto both = grouped_linear(rows, part_here(gate_up_proj), counts).split(inner_, -1);
  const auto inner = activation_ == Activation::kSilu ? swiglu(both[0], both[1]) : geglu(both[0], both[1]);
  return grouped_linear(inner, part_here(down_proj), counts);
}

ExpertOrder order_by_expert(const at::Tensor& chosen, int64_t experts) {
  const at::NoGradGuard no_grad;
  const auto flat = chosen.reshape({-1});
  const auto order = std::get<1>(at::sort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/false));
  return {order, inverse_permutation(order), at::bincount(flat, /*weights=*/{}, experts).to(at::kCPU)};
}

at::Tensor combine(const at::Tensor& results, const ExpertOrder& order, const at::Tensor& weights) {
  const int64_t tokens = weights.size(0), chosen = weights.size(1);
  const auto back = permute_rows(results, order.inverse, order.order).view({tokens, chosen, results.size(1)});
  return at::bmm(weights.to(back.scalar_type()).unsqueeze(1), back).squeeze(1);
}

MoE::MoE(const MoEOptions& moe, const ParameterOptions& options) : expert_count_(moe.experts), chosen_(moe.chosen) {
  register_module("gate", gate, std::make_shared<Router>(moe, options));
  register_module("experts", experts, std::make_shared<Experts>(moe, options));
}

at::Tensor MoE::forward(const at::Tensor& x, const RealTokens& real) {
  if (exchange_) return exchange_->run(*this, x, real);
  TESSERA_CHECK(!is_dtensor(x), ErrorKind::kShape,
                "[nn.moe] found a DTensor lying as {}, wanted a plain tensor. Call apply_expert_parallel on models "
                "that are tensor-parallel.",
                to_string(placements(x)));
  const auto rows = x.reshape({-1, x.size(-1)});
  const auto routing = (*gate)(rows, RealTokens{real.mask.defined() ? real.mask.reshape({-1}) : at::Tensor()});
  const auto order = order_by_expert(routing.experts, expert_count_);
  const auto sorted = permute_rows(rows, order.order, order.inverse, chosen_);
  return combine((*experts)(sorted, order.counts), order, routing.weights).view(x.sizes());
}

}  // namespace tessera::nn
