// Tests the attention module and the MLP on one rank: values and gradients against plain operations, pages of keys and
// values against whole sequences, and construction on the meta device.
#include "tessera/nn/attention/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

std::shared_ptr<Attention> make_attention(int64_t heads, int64_t kv_heads, bool bias) {
  auto attention = std::make_shared<Attention>(
      AttentionOptions{
          .width = 24, .heads = heads, .kv_heads = kv_heads, .head_dim = 8, .qkv_bias = bias, .output_bias = bias},
      ParameterOptions{});
  at::manual_seed(11);
  at::NoGradGuard no_grad;
  for (const auto& parameter : attention->parameters()) parameter.normal_(0, 0.3);
  return attention;
}

AttentionContext make_context(int64_t tokens) {
  const auto angles = at::arange(tokens, at::kFloat).view({1, tokens, 1}) * at::rand({4}).view({1, 1, 4});
  return {.angles = {angles.cos(), angles.sin()}};
}

// Returns softmax(q kT / sqrt(d)) v with repeated key-value heads, in plain operations.
at::Tensor plain_attention(Attention& a, const at::Tensor& x, const AttentionContext& context, int64_t heads,
                           int64_t kv_heads, const at::Tensor& allowed) {
  const auto cos = at::cat({context.angles.cos, context.angles.cos}, -1).unsqueeze(1);
  const auto sin = at::cat({context.angles.sin, context.angles.sin}, -1).unsqueeze(1);
  const auto project = [&](Linear& linear, int64_t count) {
    return at::linear(x, linear.weight, linear.bias).view({x.size(0), x.size(1), count, 8}).transpose(1, 2);
  };
  const auto rotate = [&](const at::Tensor& t) {
    const auto halves = t.chunk(2, -1);
    return t * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
  };
  const auto q = rotate(project(*a.q_proj, heads));
  const auto k = rotate(project(*a.k_proj, kv_heads)).repeat_interleave(heads / kv_heads, 1);
  const auto v = project(*a.v_proj, kv_heads).repeat_interleave(heads / kv_heads, 1);
  const auto scores = (q.matmul(k.transpose(2, 3)) / std::sqrt(8.0)).masked_fill(allowed.logical_not(), -1e30);
  const auto y = at::softmax(scores, -1).matmul(v).transpose(1, 2).reshape({x.size(0), x.size(1), heads * 8});
  return at::linear(y, a.o_proj->weight, a.o_proj->bias);
}

at::Tensor lower(int64_t tokens) { return at::ones({tokens, tokens}, at::kBool).tril(); }

TEST(Attention, GroupedHeadsMatchPlainOpsWithGradients) {
  for (const auto& [heads, kv_heads, bias] :
       std::vector<std::tuple<int64_t, int64_t, bool>>{{6, 2, false}, {3, 3, true}, {4, 1, true}}) {
    auto attention = make_attention(heads, kv_heads, bias);
    const auto context = make_context(9);
    auto x = at::randn({2, 9, 24}).set_requires_grad(true), same = x.detach().clone().set_requires_grad(true);
    const auto found = (*attention)(x, context);
    found.square().sum().backward();
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : attention->parameters()) gradients.push_back(parameter.grad().clone());
    attention->zero_grad();
    const auto wanted = plain_attention(*attention, same, context, heads, kv_heads, lower(9));
    wanted.square().sum().backward();
    EXPECT_TRUE(at::allclose(found, wanted, 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(x.grad(), same.grad(), 1e-4, 1e-4));
    for (size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TRUE(at::allclose(gradients[i], attention->parameters()[i].grad(), 1e-3, 1e-3)) << "parameter " << i;
    }
  }
}

TEST(Attention, PagedKvCacheEqualsTheFullSequence) {
  at::NoGradGuard no_grad;
  auto attention = make_attention(6, 2, false);
  const auto x = at::randn({1, 10, 24});
  const auto whole = make_context(10);
  const auto wanted = (*attention)(x, whole);
  PagedKVCache store(1, 1);
  const std::vector<int32_t> pages = {0};
  int64_t begin = 0;
  for (const int64_t step : {4, 1, 3, 2}) {
    PagedBatch paged(store, {{.first_row = 0, .rows = step, .first_position = begin, .pages = pages}}, {0});
    const AttentionContext context{
        .angles = {whole.angles.cos.narrow(1, begin, step), whole.angles.sin.narrow(1, begin, step)}, .paged = &paged};
    const auto found = (*attention)(x.narrow(1, begin, step), context);
    EXPECT_TRUE(at::allclose(found, wanted.narrow(1, begin, step), 1e-4, 1e-5)) << "tokens from " << begin;
    begin += step;
  }
  EXPECT_THROW(PagedBatch(store, {{.first_row = 0, .rows = 7, .first_position = begin, .pages = pages}}, {0}), Error)
      << "17 tokens in a page";
}

// A rank of two has half of the heads. The module has no setting for the count; the sizes of the projections give it.
TEST(Attention, NumberOfHeadsFollowsTheShardedProjections) {
  at::NoGradGuard no_grad;
  auto attention = make_attention(6, 2, false);
  const auto x = at::randn({2, 9, 24});
  const auto context = make_context(9);
  const auto wanted = (*attention)(x, context);
  std::vector<at::Tensor> whole;
  for (const auto& parameter : attention->parameters()) whole.push_back(parameter);
  auto sum = at::zeros_like(wanted);
  for (const int64_t half : {0, 1}) {
    const auto slots = attention->named_parameters();
    for (size_t i = 0; i < slots.size(); ++i) {
      Module::set_parameter(*slots[i].slot, whole[i].chunk(2, slots[i].name == "o_proj.weight" ? 1 : 0)[half]);
    }
    sum.add_((*attention)(x, context));
  }
  EXPECT_TRUE(at::allclose(sum, wanted, 1e-4, 1e-5));
}

TEST(Layers, MetaDeviceAllocatesNothing) {
  // A weight of 236 elements would need 128 GiB if it were allocated.
  MLP mlp(1 << 18, 1 << 18, {.bias = true}, {.dtype = at::kBFloat16, .device = at::kMeta});
  for (const auto& parameter : mlp.named_parameters()) {
    EXPECT_TRUE(parameter.slot->parameter.is_meta()) << parameter.name;
    EXPECT_EQ(parameter.slot->decay, !parameter.name.ends_with("bias")) << parameter.name;
    EXPECT_TRUE(parameter.slot->parameter.requires_grad());
  }
  EXPECT_EQ(mlp.named_parameters().size(), 6U);
}

}  // namespace
}  // namespace tessera::nn
