// Tests attention on DTensors, with its heads sharded over the ranks, against attention on plain tensors.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/nn/attention/attention.h"
#include "tests/dtensor/support.h"

namespace tessera::nn {
namespace {

using testing::on_ranks;

constexpr int64_t kTokens = 9, kWidth = 24;

std::shared_ptr<Attention> make_attention() {
  auto attention = std::make_shared<Attention>(
      AttentionOptions{.width = kWidth, .heads = 4, .kv_heads = 2, .head_dim = 8}, ParameterOptions{});
  auto seed = 0.0;
  for (const auto& parameter : attention->parameters()) {
    seed += 1;
    parameter.detach().copy_(
        at::arange(static_cast<double>(parameter.numel())).add(seed).sin().view(parameter.sizes()));
  }
  return attention;
}

// Three kinds of rows: one document a row, several documents with padding, several documents with a window.
std::vector<AttentionPatternOptions> patterns() {
  const auto ids =
      at::tensor(std::vector<int64_t>{0, 0, 0, 1, 1, 1, 1, -1, -1, 5, 5, 5, 5, 5, 5, 6, 7, 7}).view({2, 9});
  return {{.rows = 2, .tokens = kTokens},
          {.rows = 2, .tokens = kTokens, .document_ids = ids},
          {.rows = 2, .tokens = kTokens, .document_ids = ids, .sliding_window = 3}};
}

TEST(AttentionOnDTensors, ShardedHeadsEqualPlainAttention) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    for (const auto& wanted_pattern : patterns()) {
      const auto angles = at::arange(static_cast<double>(kTokens * 4)).to(at::kFloat).view({1, kTokens, 4}).sin();
      const auto whole = at::arange(2.0 * kTokens * kWidth).cos().to(at::kFloat).view({2, kTokens, kWidth});
      const AttentionContext context{.angles = {angles.cos(), angles.sin()},
                                     .pattern = attention_pattern(wanted_pattern, whole.options())};
      auto plain = make_attention(), cut = make_attention();
      const auto read =
          wanted_pattern.document_ids.defined() ? wanted_pattern.document_ids.ge(0) : at::ones({2, kTokens}, at::kBool);
      const auto weight = whole.sin() * read.unsqueeze(2);
      const auto wanted = (*plain)(whole, context);
      (wanted * weight).sum().backward();

      for (auto& named : cut->named_parameters()) {
        const auto how = named.name == "o_proj.weight" ? Shard(1) : Shard(0);
        Module::set_parameter(
            *named.slot,
            distribute_tensor(named.slot->parameter.detach(), mesh, {how}, std::nullopt).set_requires_grad(true));
      }
      const auto x = distribute_tensor(whole, mesh, {Replicate()}, std::nullopt);
      const CommDebugMode comm;
      const auto found = (*cut)(x, context);
      EXPECT_EQ(placements(found), Placements{Partial()});
      EXPECT_EQ(comm.total(), 0);
      const auto rows = read.unsqueeze(2).expand_as(wanted);
      EXPECT_TRUE(at::allclose(full_tensor(found).masked_select(rows), wanted.masked_select(rows), 1e-4, 1e-4));
      (found * distribute_tensor(weight, mesh, {Replicate()}, std::nullopt)).sum().backward();
      for (size_t i = 0; i < cut->parameters().size(); ++i) {
        const auto gradient = plain->parameters()[i].grad();
        EXPECT_TRUE(at::allclose(full_tensor(cut->parameters()[i].grad()), gradient, 1e-3, 1e-3)) << i;
      }
    }
  });
}

}  // namespace
}  // namespace tessera::nn
