// Tests of the styles of tensor parallelism (column-wise, row-wise, sequence parallel and others): outputs and
// gradients are equal to those of the plain modules.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tests/parallel/styled.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kClose = 2e-6;

at::Tensor values_of(std::vector<int64_t> shape, uint64_t seed = 21) { return Values(seed)(std::move(shape), 1.0); }

// The output, and the gradients of the input and the parameters. The loss is the sum of the squared output.
struct Outcome {
  at::Tensor output, input_gradient;
  std::vector<at::Tensor> gradients;
};

template <class M>
Outcome outcome_of(M& module, M& like, const at::Tensor& input) {
  const bool learns = input.is_floating_point();
  const auto x = input.clone().set_requires_grad(learns);
  auto y = module(x);
  if (is_dtensor(y)) y = full_tensor(y);
  y.square().sum().backward();
  return {y.detach(), learns ? x.grad() : at::Tensor(), gradients_by_name(module, like)};
}

void expect_close(const Outcome& found, const Outcome& wanted) {
  EXPECT_LT(distance({found.output}, {wanted.output}), kClose);
  if (wanted.input_gradient.defined()) {
    EXPECT_LT(distance({found.input_gradient}, {wanted.input_gradient}), kClose);
  }
  EXPECT_LT(distance(found.gradients, wanted.gradients), kClose);
}

std::shared_ptr<nn::Linear> linear(int64_t in, int64_t out, bool bias = true) {
  auto made = std::make_shared<nn::Linear>(in, out, bias, nn::ParameterOptions{.device = test_device()});
  draw(*made);
  return made;
}

// Outputs that stay DTensors are compared as full tensors, so the gradient of the output is a full tensor, too.
TEST(Styles, ColwiseAndRowwiseLinearEqualThePlainModule) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [](const WorldPtr& world) {
      const auto mesh = tensor_line(world);
      for (const int64_t out : {8, 10}) {  // 10 is not divisible by 3 or 4
        const auto plain = linear(10, out), columns = linear(10, out), rows = linear(10, out);
        const auto x = values_of({2, 5, 10});
        const auto wanted = outcome_of(*plain, *plain, x);
        parallelize_module(*columns, mesh, style<ColwiseParallel>(LayoutOptions{.use_local_output = false}));
        EXPECT_EQ(placements(columns->weight), Placements{Shard(0)});
        EXPECT_EQ(placements(columns->bias), Placements{Shard(0)});
        expect_close(outcome_of(*columns, *plain, x), wanted);
        parallelize_module(*rows, mesh, style<RowwiseParallel>(LayoutOptions{.input_layout = Replicate()}));
        EXPECT_EQ(placements(rows->weight), Placements{Shard(1)});
        EXPECT_EQ(placements(rows->bias), Placements{Replicate()});
        expect_close(outcome_of(*rows, *plain, x), wanted);
      }
    });
  }
}

TEST(Styles, UnevenLocalShardsPassFromColwiseToRowwise) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [](const WorldPtr& world) {
      auto plain =
          std::make_shared<nn::MLP>(6, 10, nn::MLPOptions{.bias = true}, nn::ParameterOptions{.device = test_device()});
      auto parallel =
          std::make_shared<nn::MLP>(6, 10, nn::MLPOptions{.bias = true}, nn::ParameterOptions{.device = test_device()});
      draw(*plain);
      draw(*parallel);
      const auto x = values_of({2, 3, 6});
      const auto wanted = outcome_of(*plain, *plain, x);
      parallelize_module(*parallel, tensor_line(world),
                         {{"[gu]*_proj", style<ColwiseParallel>()}, {"down_proj", style<RowwiseParallel>()}});
      CommDebugMode comm;
      const auto found = outcome_of(*parallel, *plain, x);
      expect_close(found, wanted);
      EXPECT_EQ(comm.all_reduces(), 1 + 2) << "forward, and one for each product that reads x";
    });
  }
}

TEST(Styles, RowwiseAndColwiseEmbeddingEqualThePlainModule) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [](const WorldPtr& world) {
      const auto make = [] {
        auto made = std::make_shared<nn::Embedding>(11, 6, nn::ParameterOptions{.device = test_device()},
                                                    nn::EmbeddingOptions{.padding_id = 3});
        draw(*made);
        return made;
      };
      const auto mesh = tensor_line(world);
      const auto ids = rows_of_text(0, 3, 7, 11).first;
      const auto plain = make(), rows = make(), columns = make(), sequence = make();
      const auto wanted = outcome_of(*plain, *plain, ids);
      parallelize_module(*rows, mesh, style<RowwiseParallel>(LayoutOptions{.input_layout = Replicate()}));
      EXPECT_EQ(placements(rows->weight), Placements{Shard(0)});
      expect_close(outcome_of(*rows, *plain, ids), wanted);
      parallelize_module(*columns, mesh, style<ColwiseParallel>(LayoutOptions{.use_local_output = false}));
      EXPECT_EQ(placements(columns->weight), Placements{Shard(1)});
      expect_close(outcome_of(*columns, *plain, ids), wanted);
      parallelize_module(*sequence, mesh,
                         style<RowwiseParallel>(LayoutOptions{
                             .input_layout = Replicate(), .output_layout = Shard(1), .use_local_output = false}));
      EXPECT_EQ(placements((*sequence)(ids)), Placements{Shard(1)});
      expect_close(outcome_of(*sequence, *plain, ids), wanted);
    });
  }
}

TEST(Styles, SequenceParallelNormSumsTheGradientOfItsWeight) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [](const WorldPtr& world) {
      const auto make = [] {
        auto made = std::make_shared<nn::RMSNorm>(6, nn::NormOptions{}, nn::ParameterOptions{.device = test_device()});
        draw(*made);
        return made;
      };
      const auto mesh = tensor_line(world);
      const auto plain = make(), parallel = make(), gathered = make();
      gathered->weight.set_requires_grad(false);
      const auto x = values_of({2, 7, 6});  // 7 is not divisible by any world size
      const auto wanted = outcome_of(*plain, *plain, x);
      parallelize_module(*parallel, mesh, style<SequenceParallel>());
      parallelize_module(*gathered, mesh, style<SequenceParallelAllGatherActivation>());
      EXPECT_FALSE(gathered->weight.requires_grad()) << "stays frozen";
      const auto leaf = x.clone().set_requires_grad(true);
      const auto y = (*parallel)(redistribute(from_local(leaf, mesh, {Replicate()}), {Shard(1)}));
      EXPECT_EQ(placements(y), Placements{Shard(1)});
      full_tensor(y).square().sum().backward();
      expect_close({full_tensor(y).detach(), leaf.grad(), gradients_by_name(*parallel, *plain)}, wanted);
      EXPECT_EQ(placements((*gathered)(distribute_tensor(x, mesh, {Shard(1)}))), Placements{Replicate()});
      // A plain tensor is this rank's shard.
      EXPECT_EQ((*parallel)(values_of({2, 2, 6})).size(1), 2 * world->size());
    });
  }
}

TEST(Styles, QKNormParallelUsesTheHeadsOfTheRank) {
  for (const int ranks : {2, 4}) {
    on_threads(ranks, [](const WorldPtr& world) {
      const auto mesh = tensor_line(world);
      nn::RMSNorm plain(6, {}, {.device = test_device()}), parallel(6, {}, {.device = test_device()});
      draw(plain);
      draw(parallel);
      const auto x = values_of({2, 3, 4, 6});
      plain(x).square().sum().backward();
      parallelize_module(parallel, mesh, style<QKNormParallel>());
      const auto part = x.tensor_split(world->size(), 2)[static_cast<size_t>(world->rank())].contiguous();
      const auto y = parallel(part);
      EXPECT_FALSE(is_dtensor(y));
      y.square().sum().backward();
      EXPECT_LT(distance(gradients_by_name(parallel, plain), gradients_by_name(plain, plain)), kClose);
      EXPECT_EQ(placements(parallel(distribute_tensor(x, mesh, {Shard(2)}))), Placements{Shard(2)});
      EXPECT_THAT(error_of([&] { parallel(distribute_tensor(x, mesh, {Shard(1)})); }), HasSubstr("(S(2))"));
    });
  }
}

TEST(Styles, ReplicatedKeyValueEqualsThePlainModule) {
  for (const int64_t kv_heads : {1, 2}) {
    on_threads(4, [kv_heads](const WorldPtr& world) {
      const int64_t head_dim = 3;
      const auto plain = linear(5, kv_heads * head_dim), parallel = linear(5, kv_heads * head_dim);
      const auto x = values_of({2, 3, 5});
      const auto head = world->rank() * kv_heads / 4;
      const auto weight_of = [&](int64_t rank) {
        return 1.0 + static_cast<double>(rank);
      };  // factor of the loss, different for each rank's queries
      auto all = (*plain)(x);
      at::Tensor sum = here(at::zeros({}));
      for (int64_t rank = 0; rank < 4; ++rank) {
        sum = sum + weight_of(rank) * all.narrow(-1, rank * kv_heads / 4 * head_dim, head_dim).square().sum();
      }
      sum.backward();
      parallelize_module(*parallel, tensor_line(world), style<ReplicatedKeyValue>(kv_heads));
      const auto own = (*parallel)(x);
      EXPECT_LT(distance({own}, {all.narrow(-1, head * head_dim, head_dim)}), kClose);
      (weight_of(world->rank()) * own.square().sum()).backward();
      EXPECT_LT(distance(gradients_by_name(*parallel, *plain), gradients_by_name(*plain, *plain)), kClose);
    });
  }
}

struct Angles : nn::Callable<Angles> {
  at::Tensor inverse;
  Angles() { register_buffer("inverse", inverse, here(at::arange(1, 4)).to(at::kFloat).reciprocal()); }
  nn::RotaryAngles forward(const at::Tensor& x, const at::Tensor& positions) {
    const auto angles = positions.to(at::kFloat).unsqueeze(-1) * inverse + 0 * x.size(1);
    return {.cos = angles.cos(), .sin = angles.sin()};
  }
};

TEST(Styles, RotaryEmbedParallelGivesTheAnglesOfAllTokens) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = tensor_line(world);
    Angles plain, parallel, distributed;
    const auto positions = here(at::arange(6)).unsqueeze(0);
    const auto wanted = plain(values_of({1, 6, 4}), positions);
    parallelize_module(parallel, mesh, style<RotaryEmbedParallel>(SequenceParallelOptions{.use_local_output = true}));
    parallelize_module(distributed, mesh, style<RotaryEmbedParallel>());
    const auto found = parallel(values_of({1, 3, 4}), positions);
    EXPECT_FALSE(is_dtensor(found.cos));
    EXPECT_TRUE(found.cos.equal(wanted.cos));
    EXPECT_TRUE(found.sin.equal(wanted.sin));
    EXPECT_EQ(placements(distributed(distribute_tensor(values_of({1, 5, 4}), mesh, {Shard(1)}), positions).sin),
              Placements{Replicate()});
    EXPECT_THAT(error_of([&] {
                  parallel(values_of({1, 3 + world->rank(), 4}), positions);
                }),
                HasSubstr("all ranks need the same shape"));
  });
}

TEST(Styles, PrepareModuleInputOutputRedistributes) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = tensor_line(world);
    Block block(6, 10, false);
    draw(block);
    at::Tensor seen;
    block.norm->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) { seen = *inputs[0]; });
    parallelize_module(
        block, mesh,
        {{"norm",
          style<PrepareModuleInputOutput>(
              PrepareModuleInputOptions{
                  .input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate()}, .use_local_output = true},
              PrepareModuleOutputOptions{.output_layouts = {Replicate()}, .desired_output_layouts = {Shard(0)}})}});
    const auto x = values_of({2, 3, 6});
    const auto y = (*block.norm)(x);  // two rows on this rank, four in all
    EXPECT_EQ(y.size(0), 2);
    EXPECT_FALSE(is_dtensor(y));
    EXPECT_EQ(seen.size(0), 2) << "hooks of before see the input as it was";
    EXPECT_THAT(error_of([] { PrepareModuleInput({.input_layouts = {Shard(0)}}); }),
                HasSubstr("input_layouts and desired_input_layouts should have same length!"));
    nn::RMSNorm other(6, {}, {});
    parallelize_module(other, mesh,
                       style<PrepareModuleInput>(PrepareModuleInputOptions{
                           .input_layouts = {Shard(0), std::nullopt}, .desired_input_layouts = {Replicate(), {}}}));
    EXPECT_THAT(error_of([&] { other(x); }), HasSubstr("module inputs and input_layouts should have same length!"));
  });
}

TEST(ParallelizeModule, EqualsOneRankWithAndWithoutSequenceParallelism) {
  for (const int ranks : {2, 3, 4}) {
    on_threads(ranks, [](const WorldPtr& world) {
      for (const bool tied : {false, true}) {
        for (const bool sequence_parallel : {false, true}) {
          Stack plain({.tied = tied}), parallel({.tied = tied});
          EXPECT_THAT(parallelize_module(parallel, tensor_line(world), stack_plan(sequence_parallel)), IsEmpty());
          EXPECT_EQ(parallel.lm_head->weight.is_same(parallel.embed_tokens->weight), tied);
          const auto [tokens, labels] = rows_of_text(1, 2, 5, 11);
          const auto wanted = plain(tokens, labels), found = parallel(tokens, labels);
          EXPECT_FALSE(is_dtensor(found)) << "a loss is a plain scalar";
          EXPECT_NEAR(found.item<double>(), wanted.item<double>(), 1e-6 * std::abs(wanted.item<double>()));
          wanted.backward();
          found.backward();
          EXPECT_LT(distance(gradients_by_name(parallel, plain), gradients_by_name(plain, plain)), 1e-5);
        }
      }
    });
  }
}

TEST(ParallelizeModule, SequenceParallelBlockAllGathersAndReduceScattersOnce) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = tensor_line(world);
    Stack stack({.inner = 8, .blocks = 1, .bias = false});
    parallelize_module(stack, mesh, stack_plan(true));
    const auto x = distribute_tensor(values_of({2, 4, 6}), mesh, {Shard(1)}).set_requires_grad(true);
    CommDebugMode comm;
    const auto y = (*stack.blocks[0])(x);
    EXPECT_EQ(comm.all_gathers(), 1);
    EXPECT_EQ(comm.reduce_scatters(), 1);
    y.sum().backward();
    EXPECT_EQ(comm.reduce_scatters(), 2) << "one for both products that read the norm's output";
  });
}

TEST(ParallelizeModule, RefusesInvalidPlans) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = tensor_line(world);
    const auto refusal = [&](const ParallelPlan& plan, bool tied = false) {
      Stack stack({.tied = tied});
      return error_of([&] { parallelize_module(stack, mesh, plan); });
    };
    EXPECT_THAT(refusal({{"layers.*.mlp", style<ColwiseParallel>()}}), HasSubstr("layers.*.mlp"));
    EXPECT_THAT(refusal({{"norm", style<ColwiseParallel>()}}), HasSubstr("only support nn.Linear and nn.Embedding"));
    EXPECT_THAT(refusal({{"block*.mlp", style<RowwiseParallel>()}}), HasSubstr("block0.mlp"));
    EXPECT_THAT(refusal({{"embed_tokens", style<RowwiseParallel>()}}), HasSubstr("input_layout Replicate"));
    const auto rows = style<RowwiseParallel>(LayoutOptions{.input_layout = Replicate()});
    EXPECT_THAT(refusal({{"embed_tokens", rows}}, /*tied=*/true), HasSubstr("no style for 'lm_head'"));
    EXPECT_THAT(refusal({{"lm_head", style<ColwiseParallel>()}, {"embed_tokens", style<ColwiseParallel>()}}, true),
                HasSubstr("embed_tokens.weight: found a DTensor with placements (S(0))"));
    EXPECT_THAT(refusal({{"lm_head", style<ColwiseParallel>()}, {"lm_*", style<ColwiseParallel>()}}),
                HasSubstr("already"));
    Stack stack({});
    EXPECT_THAT(
        error_of([&] {
          parallelize_module(stack, init_device_mesh(world, test_device_type(), {2, 1}, {"a", "b"}), stack_plan(false));
        }),
        HasSubstr("1-d mesh"));
    const auto unmatched =
        parallelize_module(stack, mesh, {{"nothing.here", rows}, {"embed_tokens", rows}}, {.warn_unmatched = false});
    EXPECT_THAT(unmatched, ElementsAre("nothing.here"));
  });
}

TEST(ParallelizeModule, FindsModulesByPattern) {
  Stack stack({.blocks = 3});
  const auto names = [&](const std::string& pattern) {
    std::vector<std::string> out;
    for (const auto& [path, module] : match_modules(stack, pattern)) out.push_back(path);
    return out;
  };
  EXPECT_THAT(names("block?.mlp.*_proj").size(), 9);
  EXPECT_THAT(names("block1.norm"), ElementsAre("block1.norm"));
  EXPECT_THAT(names("*.norm"), ElementsAre("block0.norm", "block1.norm", "block2.norm"));
  EXPECT_THAT(names(""), ElementsAre(""));
  EXPECT_THAT(names("block1.norm.weight"), IsEmpty());
}

// The option decides whose values are used.
TEST(ParallelizeModule, SrcDataRankSelectsTheValues) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = tensor_line(world);
    for (const bool own : {false, true}) {
      nn::Linear module(2, 4, false, {});
      const at::NoGradGuard no_grad;
      module.own_parameters()[0].parameter.fill_(world->rank() + 1);
      parallelize_module(module, mesh, style<ColwiseParallel>(),
                         {.src_data_rank = own ? std::nullopt : std::optional(0)});
      EXPECT_EQ(to_local(module.weight).sum().item<double>(), 4 * (own ? world->rank() + 1 : 1));
    }
  });
}

}  // namespace
}  // namespace tessera::testing
