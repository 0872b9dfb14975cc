// Tests the MoE layer and the statistics of its router against plain loops over experts and formulas of transformers.
#include "tessera/nn/experts/moe.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

void draw(Module& module) {
  const at::NoGradGuard no_grad;
  at::manual_seed(3);
  for (const auto& parameter : module.parameters()) parameter.copy_(at::randn(parameter.sizes()) * 0.5);
}

// Computes the layer as transformers does, in a loop over experts. taken[token * chosen + k] says whether the choice
// counts; an empty list takes all choices.
at::Tensor reference(MoE& block, const at::Tensor& x, bool normalise, const std::vector<bool>& taken = {}) {
  const auto rows = x.reshape({-1, x.size(-1)});
  auto [weights, chosen] = at::topk(at::softmax(at::linear(rows, block.gate->weight), -1), block.experts_per_token());
  if (normalise) weights = weights / weights.sum(-1, true);
  std::vector<at::Tensor> out;
  for (int64_t token = 0; token < rows.size(0); ++token) {
    auto sum = at::zeros({rows.size(1)});
    for (int64_t k = 0; k < block.experts_per_token(); ++k) {
      if (!taken.empty() && !taken[static_cast<size_t>(token * block.experts_per_token() + k)]) continue;
      const auto expert = chosen[token][k].item<int64_t>();
      const auto both = at::mv(block.experts->gate_up_proj[expert], rows[token]).chunk(2);
      sum = sum + weights[token][k] * at::mv(block.experts->down_proj[expert], at::silu(both[0]) * both[1]);
    }
    out.push_back(sum);
  }
  return at::stack(out).view(x.sizes());
}

TEST(MoE, EqualsALoopOverExperts) {
  for (const bool normalise : {false, true}) {
    MoE block({.width = 6, .inner = 5, .experts = 7, .experts_per_token = 3, .normalise_top_k = normalise}, {});
    draw(block);
    const auto x = at::randn({2, 9, 6});
    std::vector<std::vector<at::Tensor>> gradients;
    std::vector<at::Tensor> results;
    for (const bool ours : {true, false}) {
      auto leaf = x.clone().set_requires_grad(true);
      block.zero_grad();
      results.push_back(ours ? block(leaf, NonPaddingMask{}) : reference(block, leaf, normalise));
      results.back().pow(2).sum().backward();
      gradients.push_back({leaf.grad()});
      for (const auto& parameter : block.parameters()) gradients.back().push_back(parameter.grad().clone());
    }
    EXPECT_TRUE(at::allclose(results[0], results[1], 1e-4, 1e-5));
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      EXPECT_TRUE(at::allclose(gradients[0][i], gradients[1][i], 1e-4, 1e-4)) << i;
    }
  }
}

// Returns the choices within a capacity. For each sequence an expert takes its choices from the largest weight down.
// Choices of padding come after all others, in the order of padding.
std::vector<bool> choices_within(const RouterOutput& routing, int64_t length, int64_t capacity,
                                 const at::Tensor& real) {
  const int64_t choices = routing.experts.size(1);
  std::vector<bool> taken(static_cast<size_t>(routing.experts.numel()), false);
  for (int64_t begin = 0; begin < routing.experts.size(0); begin += length) {
    std::map<int64_t, std::vector<std::tuple<bool, float, int64_t>>> of_expert;
    for (int64_t place = begin * choices; place < (begin + length) * choices; ++place) {
      const int64_t token = place / choices, k = place % choices;
      const bool padding = !real.view({-1})[token].item<bool>();
      of_expert[routing.experts[token][k].item<int64_t>()].emplace_back(
          padding, padding ? 0 : -routing.weights[token][k].item<float>(), place);
    }
    for (auto& [expert, wanting] : of_expert) {
      std::ranges::sort(wanting);
      wanting.resize(std::min(wanting.size(), static_cast<size_t>(capacity)));
      for (const auto& choice : wanting) taken[static_cast<size_t>(std::get<2>(choice))] = true;
    }
  }
  return taken;
}

TEST(MoE, DropsTokensBeyondTheCapacityInTraining) {
  // 7 experts, and 3 choices for each of 9 tokens: an even share is 27 / 7.
  for (const auto& [factor, capacity] : {std::pair(0.5, 2), std::pair(1.0, 4), std::pair(7.0, 27)}) {
    MoE block({.width = 6,
               .inner = 5,
               .experts = 7,
               .experts_per_token = 3,
               .normalise_top_k = true,
               .capacity_factor = factor},
              {});
    MoE all({.width = 6, .inner = 5, .experts = 7, .experts_per_token = 3, .normalise_top_k = true}, {});
    draw(block);
    draw(all);
    const auto x = at::randn({2, 9, 6});
    auto real = at::ones({2, 9}, at::kBool);
    real[1].narrow(0, 2, 5).fill_(false);
    const auto routing = (*block.gate)(x.view({-1, 6}), NonPaddingMask{});
    const auto taken = choices_within(routing, 9, capacity, real);
    EXPECT_EQ(std::ranges::count(taken, false) > 0, factor < 7);
    std::vector<std::vector<at::Tensor>> gradients;
    std::vector<at::Tensor> results;
    for (const bool ours : {true, false}) {
      auto leaf = x.clone().set_requires_grad(true);
      block.zero_grad();
      results.push_back(ours ? block(leaf, NonPaddingMask{real}) : reference(block, leaf, /*normalise=*/true, taken));
      results.back().pow(2).sum().backward();
      gradients.push_back({leaf.grad()});
      for (const auto& parameter : block.parameters()) gradients.back().push_back(parameter.grad().clone());
    }
    EXPECT_TRUE(at::allclose(results[0], results[1], 1e-4, 1e-5)) << factor;
    for (size_t i = 0; i < gradients[0].size(); ++i) {
      EXPECT_TRUE(at::allclose(gradients[0][i], gradients[1][i], 1e-4, 1e-4)) << factor << ", " << i;
    }
    block.train(false);
    EXPECT_TRUE(at::equal(block(x, NonPaddingMask{real}), all(x, NonPaddingMask{real}))) << "all are taken";
    EXPECT_EQ(block(at::rand({0, 6}), NonPaddingMask{}).sizes(), (at::IntArrayRef{0, 6}));
  }
}

// If choices have equal weights, the choices of the first tokens are taken.
TEST(MoE, FirstTokensWinTiesWithinTheCapacity) {
  MoE block({.width = 4, .inner = 3, .experts = 5, .experts_per_token = 1, .capacity_factor = 1}, {});
  draw(block);
  const auto x = at::ones({3, 10, 4});
  const auto y = block(x, NonPaddingMask{}).abs().amax(-1).gt(0);
  EXPECT_TRUE(at::equal(y, at::arange(10).lt(2).expand({3, 10})));
}

TEST(MoE, UnusedExpertsGetZeroGradients) {
  MoE block({.width = 4, .inner = 3, .experts = 5, .experts_per_token = 1}, {});
  draw(block);
  {
    const at::NoGradGuard no_grad;
    block.gate->weight.zero_();
    block.gate->weight[2].fill_(10);
  }
  block(at::rand({8, 4}) + 0.1, NonPaddingMask{}).sum().backward();
  const auto used = block.experts->down_proj.grad().abs().amax({1, 2}).gt(0);
  EXPECT_TRUE(at::equal(used, at::arange(5).eq(2)));
  EXPECT_EQ(block(at::rand({0, 4}), NonPaddingMask{}).sizes(), (at::IntArrayRef{0, 4}));
}

// The reference is the formula of transformers' load_balancing_loss_func with an attention mask. Its derivative comes
// from autograd.
TEST(RouterStatistics, MatchTheLoadBalancingLossOfTransformersWithoutPadding) {
  MoE block({.width = 6, .inner = 5, .experts = 4, .experts_per_token = 2}, {});
  draw(block);
  const auto statistics = std::make_shared<RouterStatistics>(4, 0.3);
  block.gate->statistics = statistics;
  const auto x = at::randn({3, 7, 6});
  auto mask = at::ones({3, 7}, at::kBool);
  mask[1].narrow(0, 3, 4).fill_(false);
  const auto rows = x.view({-1, 6}), counted = mask.view({-1}).to(at::kFloat);
  const auto probabilities = at::softmax(at::linear(rows, block.gate->weight), -1);
  const auto chosen = std::get<1>(at::topk(probabilities, 2));
  const auto share = (at::one_hot(chosen, 4).sum(1) * counted.unsqueeze(1)).sum(0) / counted.sum();
  const auto mean = (probabilities * counted.unsqueeze(1)).sum(0) / counted.sum();
  const auto wanted = 0.3 * 4 * (share * mean).sum();
  wanted.backward();
  const auto gradient = block.gate->weight.grad().clone();
  block.zero_grad();

  (block(x, NonPaddingMask{mask}) * 0).sum().backward();
  EXPECT_EQ(block.gate->weight.grad().abs().max().item<float>(), 0) << "off";
  block.zero_grad();
  statistics->begin();
  const auto y = block(x, NonPaddingMask{mask});
  EXPECT_THROW(statistics->loss(), Error);
  statistics->finish(statistics->sums());
  EXPECT_NEAR(statistics->loss().item<double>(), wanted.item<double>(), 1e-6);
  (y * 0).sum().backward();
  EXPECT_TRUE(at::allclose(block.gate->weight.grad(), gradient, 1e-4, 1e-7));
  EXPECT_EQ(router_statistics(block), statistics);
}

// Two micro-batches are counted first, without gradients. Each of them then adds its share of the gradient.
TEST(RouterStatistics, AccumulateOverMicroBatches) {
  MoE block({.width = 6, .inner = 5, .experts = 4, .experts_per_token = 2}, {});
  draw(block);
  const auto statistics = std::make_shared<RouterStatistics>(4, 1.0);
  block.gate->statistics = statistics;
  const auto x = at::randn({10, 6});
  const auto gradient_of = [&](const std::vector<at::Tensor>& batches) {
    block.zero_grad();
    statistics->begin();
    {
      const at::NoGradGuard no_grad;
      for (const auto& batch : batches) block(batch, NonPaddingMask{});
    }
    statistics->finish(statistics->sums());
    for (const auto& batch : batches) block(batch, NonPaddingMask{}).sum().backward();
    statistics->end();
    return std::pair(statistics->loss().item<double>(), block.gate->weight.grad().clone());
  };
  const auto whole = gradient_of({x}), parts = gradient_of({x.narrow(0, 0, 3), x.narrow(0, 3, 7)});
  EXPECT_NEAR(whole.first, parts.first, 1e-9);
  EXPECT_TRUE(at::allclose(whole.second, parts.second, 1e-4, 1e-5));
}

}  // namespace
}  // namespace tessera::nn
