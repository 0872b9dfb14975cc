#include "tessera/nn/experts/moe.h"

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/linear/grouped_linear.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/linear/permute_rows.h"
#include "tessera/kernels/rows/gated.h"
#include "tessera/nn/attention/context_parallel_guard.h"

namespace tessera::nn {
namespace {

// Returns the router's local weight. `mesh` has the ranks that hold the same weight but different tokens. The weight's
// gradient is Partial over it, so that backward all-reduces the gradient.
at::Tensor shared_weight(const at::Tensor& weight, const MeshPtr& mesh) {
  if (mesh == nullptr) return local_tensor_of(weight);
  const auto everywhere = is_dtensor(weight) ? weight : from_local(weight, mesh, {Replicate()});
  return to_local(everywhere, Placements{Partial()});
}

}  // namespace

Router::Router(const MoEOptions& moe, const ParameterOptions& options)
    : experts_per_token_(moe.experts_per_token), normalise_top_k_(moe.normalise_top_k) {
  register_parameter("weight", weight, at::empty({moe.experts, moe.width}, options.tensor_options()));
}

RouterOutput Router::forward(const at::Tensor& rows, const NonPaddingMask& real) {
  const auto logits = tessera::kernels::linear(rows, shared_weight(weight, tokens_over));
  auto probabilities = at::softmax(logits, -1, kernels::wide_type(logits.scalar_type()));
  const bool counts = statistics && statistics->is_active();
  if (counts) probabilities = add_load_balance_gradient(probabilities, real.mask, statistics);
  auto [weights, experts] = at::topk(probabilities, experts_per_token_, -1);
  if (counts) statistics->count(probabilities, experts, real.mask);
  if (normalise_top_k_) weights = weights / weights.sum(-1, /*keepdim=*/true);
  return {experts, weights.to(logits.scalar_type())};
}

Experts::Experts(const MoEOptions& moe, const ParameterOptions& options)
    : inner_(moe.inner), activation_(moe.activation) {
  register_parameter("gate_up_proj", gate_up_proj,
                     at::empty({moe.experts, 2 * moe.inner, moe.width}, options.tensor_options()));
  register_parameter("down_proj", down_proj, at::empty({moe.experts, moe.width, moe.inner}, options.tensor_options()));
}

at::Tensor Experts::forward(const at::Tensor& rows, const at::Tensor& counts) {
  const auto both = kernels::grouped_linear(rows, local_tensor_of(gate_up_proj), counts).split(inner_, -1);
  const auto inner =
      activation_ == Activation::kSilu ? kernels::swiglu(both[0], both[1]) : kernels::geglu(both[0], both[1]);
  return kernels::grouped_linear(inner, local_tensor_of(down_proj), counts);
}

namespace {

// Returns a copy of routing.experts in which each dropped choice has the value `experts` (the number of experts, which
// is no expert's id). A choice is dropped when it exceeds the expert's capacity in its sequence. The choices are sorted
// into groups by (sequence, expert), within a group by descending weight. A choice's position in its group is its index
// minus the index of the group's first choice. Choices at positions >= capacity are dropped. Choices of padding tokens
// get weight -1 and are therefore last in their group.
at::Tensor drop_beyond_capacity(const RouterOutput& routing, int64_t length, int64_t experts, int64_t capacity,
                                const at::Tensor& real) {
  const at::NoGradGuard no_grad;
  const auto expert_ids = routing.experts.reshape({-1});
  const int64_t choices = routing.experts.size(1);
  auto weights = routing.weights.detach();
  if (real.defined()) weights = weights.masked_fill(real.logical_not().unsqueeze(1), -1);
  const auto places = at::arange(expert_ids.numel(), expert_ids.options());
  const auto group = places.div(length * choices, "floor") * experts + expert_ids;  // one number per (sequence, expert)
  const auto by_weight = at::argsort(weights.reshape({-1}), /*stable=*/true, /*dim=*/0, /*descending=*/true);
  const auto order = by_weight.index_select(
      0, at::argsort(group.index_select(0, by_weight), /*stable=*/true, /*dim=*/0, /*descending=*/false));
  const auto sorted = group.index_select(0, order);
  const auto dropped = (places - at::searchsorted(sorted, sorted)).ge(capacity);
  return expert_ids.masked_fill(at::empty_like(dropped).index_copy_(0, order, dropped), experts)
      .view(routing.experts.sizes());
}

}  // namespace

ExpertPermutation permutation_by_expert(const at::Tensor& expert_ids, int64_t experts) {
  const at::NoGradGuard no_grad;
  const auto flat = expert_ids.reshape({-1});
  const auto order = std::get<1>(at::sort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/false));
  // at::bincount() is not used, because the host would have to wait for the largest id to know the size of the result.
  // Dropped choices have the expert id `experts`, so the last element counts them.
  const auto counts = at::zeros({experts + 1}, flat.options()).scatter_add_(0, flat, at::ones_like(flat));
  return {order, kernels::inverse_permutation(order), counts.narrow(0, 0, experts).to(at::kCPU)};
}

at::Tensor permute_to_experts(const at::Tensor& rows, const ExpertPermutation& order, int64_t experts_per_token) {
  const auto sorted = kernels::permute_rows(rows, order.order, order.inverse, experts_per_token);
  const int64_t kept = order.counts.sum().item<int64_t>();
  return kept == sorted.size(0) ? sorted : sorted.narrow(0, 0, kept);
}

// `results` has no rows for dropped choices. These are last in the sorted order, so rows of zeros are appended for
// them.
at::Tensor unpermute_and_combine(const at::Tensor& results, const ExpertPermutation& order, const at::Tensor& weights) {
  const int64_t tokens = weights.size(0), experts_per_token = weights.size(1);
  const int64_t dropped = tokens * experts_per_token - results.size(0);
  const auto all = dropped > 0 ? at::cat({results, results.new_zeros({dropped, results.size(1)})}) : results;
  const auto back =
      kernels::permute_rows(all, order.inverse, order.order).view({tokens, experts_per_token, results.size(1)});
  // For each token, multiplies the weights [1, experts_per_token] with the results [experts_per_token, width].
  return at::bmm(weights.to(back.scalar_type()).unsqueeze(1), back).squeeze(1);
}

MoE::MoE(const MoEOptions& moe, const ParameterOptions& options)
    : expert_count_(moe.experts), experts_per_token_(moe.experts_per_token), capacity_factor_(moe.capacity_factor) {
  register_module("gate", gate, std::make_shared<Router>(moe, options));
  register_module("experts", experts, std::make_shared<Experts>(moe, options));
}

std::pair<RouterOutput, ExpertPermutation> MoE::route(const at::Tensor& rows, int64_t length,
                                                      const NonPaddingMask& real) {
  auto routing = (*gate)(rows, real);
  if (capacity_factor_ > 0 && training() && rows.size(0) > 0) {
    TESSERA_CHECK(
        ContextParallelGuard::current() == nullptr, ErrorKind::kConfig,
        "[nn.moe] found capacity_factor {} under context parallelism, where a rank has a part of each sequence; a "
        "capacity counts whole sequences. Set it to 0.",
        capacity_factor_);
    const double even = static_cast<double>(length * experts_per_token_) / static_cast<double>(expert_count_);
    const auto capacity = static_cast<int64_t>(std::ceil(capacity_factor_ * even));
    routing.experts = drop_beyond_capacity(routing, length, expert_count_, capacity, real.mask);
  }
  auto order = permutation_by_expert(routing.experts, expert_count_);
  return {std::move(routing), std::move(order)};
}

at::Tensor MoE::forward(const at::Tensor& x, const NonPaddingMask& real) {
  if (exchange_) return exchange_->run(*this, x, real);
  TESSERA_CHECK(
      !is_dtensor(x), ErrorKind::kShape,
      "[nn.moe] found a DTensor with placements {}, wanted a plain tensor. Call apply_expert_parallel on models "
      "that are tensor parallel.",
      to_string(placements(x)));
  const auto rows = x.reshape({-1, x.size(-1)});
  const NonPaddingMask flat{real.mask.defined() ? real.mask.reshape({-1}) : at::Tensor()};
  const auto [routing, order] = route(rows, x.dim() > 1 ? x.size(-2) : 1, flat);
  const auto results = (*experts)(permute_to_experts(rows, order, experts_per_token_), order.counts);
  return unpermute_and_combine(results, order, routing.weights).view(x.sizes());
}

}  // namespace tessera::nn
