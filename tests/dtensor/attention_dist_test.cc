// Tests scaled dot product attention on DTensors. The kernels that run on the CPU are compared with the plain
// operation. For the kernels of accelerators the test checks the planned call.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "tessera/comm/backends/fake_backend.h"
#include "tessera/dtensor/dispatch/plan.h"
#include "tessera/dtensor/redistribute/redistribution_log.h"
#include "tests/dtensor/op_cases.h"

namespace tessera {
namespace {

using testing::on_ranks;
using testing::random_tensor;
using testing::Tensors;

struct Attention {
  std::string name;
  std::function<at::Tensor(const Tensors&)> run;  // arguments: query, key, value and an optional mask
  std::vector<int64_t> query{4, 4, 5, 8};
  std::vector<int64_t> key{4, 4, 5, 8};
  at::Tensor mask = {};
};

at::Tensor attend(const Tensors& t, bool causal, bool gqa = false) {
  const auto mask = t.size() > 3 ? std::optional<at::Tensor>(t[3]) : std::nullopt;
  return at::scaled_dot_product_attention(t[0], t[1], t[2], mask, 0.0, causal, std::nullopt, gqa);
}

at::Tensor by_math(const Tensors& t, bool causal, bool gqa = false) {
  const auto mask = t.size() > 3 ? std::optional<at::Tensor>(t[3]) : std::nullopt;
  return std::get<0>(
      at::_scaled_dot_product_attention_math(t[0], t[1], t[2], mask, 0.0, causal, {}, std::nullopt, gqa));
}

std::vector<Attention> attentions() {
  const at::Tensor causal_mask = at::ones({5, 5}, at::kBool).tril();
  const at::Tensor bias = random_tensor({4, 1, 5, 5}, 5, false);
  const at::Tensor of_heads = random_tensor({1, 4, 5, 5}, 6, false);
  std::vector<Attention> all;
  for (const bool causal : {false, true}) {
    const std::string how = causal ? ", causal" : "";
    all.push_back({"sdpa" + how, [=](const Tensors& t) { return attend(t, causal); }});
    all.push_back({"math" + how, [=](const Tensors& t) { return by_math(t, causal); }});
    all.push_back({"flash" + how, [=](const Tensors& t) {
                     return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(t[0], t[1], t[2], 0.0, causal));
                   }});
    all.push_back(
        {"grouped" + how, [=](const Tensors& t) { return attend(t, causal, true); }, {4, 4, 5, 8}, {4, 2, 5, 8}});
    all.push_back(
        {"grouped math" + how, [=](const Tensors& t) { return by_math(t, causal, true); }, {4, 4, 5, 8}, {4, 2, 5, 8}});
  }
  for (const auto& mask : {causal_mask, bias, of_heads}) {
    const std::string shape = c10::str(mask.sizes());
    all.push_back(
        {"sdpa, mask " + shape, [](const Tensors& t) { return attend(t, false); }, {4, 4, 5, 8}, {4, 4, 5, 8}, mask});
    all.push_back(
        {"math, mask " + shape, [](const Tensors& t) { return by_math(t, false); }, {4, 4, 5, 8}, {4, 4, 5, 8}, mask});
  }
  return all;
}

struct Differentiated {
  at::Tensor output;
  Tensors gradients;
};

Differentiated differentiated(const Attention& attention, const Tensors& inputs) {
  Differentiated result{attention.run(inputs), {}};
  at::Tensor flow = random_tensor(result.output.sizes().vec(), 9, false);
  if (is_dtensor(result.output)) {
    const auto& mesh = device_mesh(result.output);
    flow = distribute_tensor(flow, mesh, Placements(mesh->ndim(), Replicate()), std::nullopt);
  }
  (result.output * flow).sum().backward();
  for (size_t i = 0; i < 3; ++i) result.gradients.push_back(inputs[i].grad());
  return result;
}

Tensors plain_inputs(const Attention& attention) {
  Tensors inputs{random_tensor(attention.query, 1, false), random_tensor(attention.key, 2, false),
                 random_tensor(attention.key, 3, false)};
  for (auto& input : inputs) input.requires_grad_();
  if (attention.mask.defined()) inputs.push_back(attention.mask);
  return inputs;
}

// All operands have these placements; the mask is replicated.
void check_attention(const Attention& attention, const MeshPtr& mesh, const Placements& how,
                     const Differentiated& wanted, bool stays) {
  const std::string where = attention.name + " " + to_string(how);
  Tensors inputs = plain_inputs(attention);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Placements lies = i < 3 ? how : Placements(how.size(), Replicate());
    inputs[i] = distribute_tensor(inputs[i].detach().set_requires_grad(i < 3), mesh, lies, std::nullopt);
  }
  const RedistributionLog log;
  const Differentiated found = differentiated(attention, inputs);
  EXPECT_TRUE(at::allclose(full_tensor(found.output), wanted.output, 1e-9, 1e-9)) << where;
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::allclose(full_tensor(found.gradients[i]), wanted.gradients[i], 1e-9, 1e-9))
        << where << " gradient " << i;
  }
  if (stays) {
    EXPECT_EQ(placements(found.output), how) << where;
    EXPECT_EQ(placements(found.gradients[1]), how) << where;
    for (const auto& record : log.records()) {
      EXPECT_TRUE(record.is_explicit || record.comm_counts.total() == 0) << where << ": " << record.to_string();
    }
  }
}

TEST(Attention, BatchAndHeadShardsAreKept) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    for (const auto& attention : attentions()) {
      const Differentiated wanted = differentiated(attention, plain_inputs(attention));
      for (const int64_t dim : {0, 1, 2, 3}) check_attention(attention, mesh, {Shard(dim)}, wanted, /*stays=*/dim < 2);
      check_attention(attention, mesh, {Partial()}, wanted, false);
    }
  });
}

TEST(Attention, BatchOverOneMeshDimAndHeadsOverTheOther) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    for (const auto& attention : attentions()) {
      const Differentiated wanted = differentiated(attention, plain_inputs(attention));
      check_attention(attention, mesh, {Shard(0), Shard(1)}, wanted, /*stays=*/true);
      const Placements heads{Shard(1), Shard(1)};
      if (attention.key[1] == 4) {
        check_attention(attention, mesh, heads, wanted, /*stays=*/true);
      } else {  // two key heads that are sharded over four ranks
        check_attention(attention, mesh, heads, wanted, false);
      }
    }
  });
}

TEST(Attention, ZeroDropoutIsNoDropout) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor q = random_tensor({2, 2, 3, 4}, 1, false);
    const at::Tensor spread = distribute_tensor(q, mesh, {Shard(1)}, std::nullopt);
    const auto [out, weights] = at::_scaled_dot_product_attention_math(spread, spread, spread, {}, 0.0, false);
    EXPECT_EQ(placements(out), Placements{Shard(1)});
    EXPECT_TRUE(at::allclose(full_tensor(weights).sum(-1), at::ones({2, 2, 3}, at::kDouble)));
  });
}

// The plan of a kernel that this machine does not have: the placements of its results on a mesh of 2 x 2.
class AttentionPlan : public ::testing::Test {
 protected:
  using Named = std::map<std::string, c10::IValue>;

  at::Tensor spread(const std::vector<int64_t>& sizes, const Placements& placements) const {
    return distribute_tensor(at::zeros(sizes, at::kHalf), mesh, placements, std::nullopt);
  }
  Named inputs(const Placements& placements, int64_t key_heads = 4) const {
    const at::Tensor key = spread({4, key_heads, 8, 16}, placements);
    return {{"query", spread({4, 4, 8, 16}, placements)},
            {"key", key},
            {"value", key},
            {"is_causal", true},
            {"compute_log_sumexp", true},
            {"attn_bias", c10::IValue()}};
  }
  Named saved(const Placements& placements) const {
    Named all = inputs(placements);
    for (const char* name : {"grad_out", "grad_out_", "out"}) all[name] = spread({4, 4, 8, 16}, placements);
    all["logsumexp"] = spread({4, 4, 8}, placements);
    for (const char* name : {"philox_seed", "philox_offset"}) all[name] = at::zeros({}, at::kLong);
    for (const char* name : {"cum_seq_q", "cum_seq_k"}) all[name] = at::Tensor();
    all["max_q"] = all["max_k"] = 8;
    all["dropout_p"] = 0.0;
    all["grad_input_mask"] = c10::List<bool>({true, true, true, true});
    return all;
  }

  // Returns the placements of the results, and the number of operands that would be redistributed.
  std::pair<std::vector<std::string>, size_t> plan(const char* name, const Named& named) const {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    std::vector<c10::IValue> args;
    for (const auto& argument : op.schema().arguments()) {
      const auto given = named.find(argument.name());
      args.push_back(given != named.end() ? given->second : argument.default_value().value_or(c10::IValue()));
    }
    OpInfo entry(op);
    entry.rule = find_rule(entry);
    const auto made = make_plan(entry, args);
    std::vector<std::string> results;
    for (const auto& output : made->outputs) {
      for (const auto& tensor : output.tensors) results.push_back(to_string(tensor.placements->values));
    }
    return {results, made->redistributions.size()};
  }

  // The first `count` results have the operands' placements; the other results are replicated.
  static std::vector<std::string> cut(size_t count, const Placements& placements, size_t all) {
    std::vector<std::string> results(count, to_string(placements));
    results.resize(all, "(R, R)");
    return results;
  }

  MeshPtr mesh =
      init_device_mesh(comm::World::create_fake(0, 4, std::make_shared<comm::FakeCostAccount>()), "cpu", {2, 2});
  const std::vector<Placements> samples_and_heads{
      {Shard(0), Shard(1)}, {Shard(1), Shard(0)}, {Shard(0), Shard(0)}, {Shard(1), Shard(1)}, {Replicate(), Shard(1)}};
};

TEST_F(AttentionPlan, ForwardKeepsBatchAndHeadShards) {
  for (const auto& how : samples_and_heads) {
    const auto named = inputs(how);
    EXPECT_EQ(plan("aten::_scaled_dot_product_flash_attention", named), std::pair(cut(2, how, 7), size_t{0}));
    EXPECT_EQ(plan("aten::_scaled_dot_product_efficient_attention", named), std::pair(cut(2, how, 4), size_t{0}));
    EXPECT_EQ(plan("aten::_scaled_dot_product_cudnn_attention", named), std::pair(cut(2, how, 7), size_t{0}));
  }
}

TEST_F(AttentionPlan, BackwardKeepsBatchAndHeadShards) {
  for (const auto& how : samples_and_heads) {
    const auto named = saved(how);
    EXPECT_EQ(plan("aten::_scaled_dot_product_flash_attention_backward", named), std::pair(cut(3, how, 3), size_t{0}));
    EXPECT_EQ(plan("aten::_scaled_dot_product_cudnn_attention_backward", named), std::pair(cut(3, how, 3), size_t{0}));
    EXPECT_EQ(plan("aten::_scaled_dot_product_efficient_attention_backward", named),
              std::pair(cut(3, how, 4), size_t{0}));
  }
}

TEST_F(AttentionPlan, BroadcastBiasIsShardedAndItsGradientIsPartial) {
  const Placements how{Shard(0), Shard(1)};
  auto named = saved(how);
  named["attn_bias"] = spread({1, 4, 8, 8}, {Replicate(), Replicate()});
  const auto [results, moved] = plan("aten::_scaled_dot_product_efficient_attention_backward", named);
  EXPECT_EQ(results, (std::vector<std::string>{"(S(0), S(1))", "(S(0), S(1))", "(S(0), S(1))", "(P(sum), S(1))"}));
  EXPECT_EQ(moved, 1U);  // the mask is sliced locally
}

TEST_F(AttentionPlan, KeyHeadsAreShardedOnlyWhenDivisible) {
  const char* const op = "aten::_scaled_dot_product_flash_attention";
  const Placements apart{Shard(0), Shard(1)};
  EXPECT_EQ(plan(op, inputs(apart, 2)), std::pair(cut(2, apart, 7), size_t{0}));
  const auto [results, moved] = plan(op, inputs({Shard(1), Shard(1)}, 2));
  EXPECT_EQ(results[0].find("S(1), S(1)"), std::string::npos) << results[0];
  EXPECT_GT(moved, 0U);
}

TEST_F(AttentionPlan, SequenceAndHeadDimShardsAreGathered) {
  for (const int64_t dim : {2, 3}) {
    const auto [results, moved] = plan("aten::_scaled_dot_product_flash_attention", inputs({Replicate(), Shard(dim)}));
    EXPECT_EQ(results[0].find("S(" + std::to_string(dim)), std::string::npos) << results[0];
    EXPECT_EQ(moved, 3U);
  }
}

TEST_F(AttentionPlan, DropoutRequiresReplicatedOperands) {
  auto named = inputs({Shard(0), Shard(1)});
  named["dropout_p"] = 0.5;
  for (const char* op : {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
                         "aten::_scaled_dot_product_cudnn_attention"}) {
    EXPECT_EQ(plan(op, named).first[0], "(R, R)") << op;
  }
}

}  // namespace
}  // namespace tessera
