// Tests of fully_shard over parameters that tensor parallelism has already sharded.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/optim/optimizer.h"
#include "tests/parallel/styled.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 4, kLength = 5;

// The mesh (dp, tp), or (replicate, shard, tp) when there are replicas.
struct Layout {
  int64_t replicas, shards, tensor_ranks;
  int ranks() const { return static_cast<int>(replicas * shards * tensor_ranks); }
  MeshPtr mesh(const WorldPtr& world) const {
    if (replicas == 1) return init_device_mesh(world, test_device_type(), {shards, tensor_ranks}, {"dp", "tp"});
    return init_device_mesh(world, test_device_type(), {replicas, shards, tensor_ranks}, {"replicate", "shard", "tp"});
  }
  MeshPtr data_parallel(const MeshPtr& mesh) const {
    return replicas == 1 ? mesh->slice({"dp"}) : mesh->slice({"replicate", "shard"});
  }
  // This rank's share of the rows.
  at::Tensor own(const at::Tensor& rows, const MeshPtr& mesh) const {
    const auto part = mesh->rank() / tensor_ranks;
    return rows.tensor_split(replicas * shards, 0)[static_cast<size_t>(part)];
  }
};

const std::vector<Layout> kLayouts = {{1, 2, 2}, {1, 1, 2}, {1, 2, 3}, {2, 2, 2}};

struct Options {
  bool sequence_parallel = false;
  bool tied = false;
  MixedPrecisionPolicy policy = {};
  bool states_over_all = true;
};

void shard(Stack& stack, const Layout& layout, const MeshPtr& mesh, const Options& options) {
  parallelize_module(stack, mesh->slice({"tp"}), stack_plan(options.sequence_parallel));
  const FullyShardOptions fsdp{.mesh = layout.data_parallel(mesh),
                               .mp_policy = options.policy,
                               .replicated_over = options.states_over_all ? mesh->slice({"tp"}) : nullptr};
  for (const auto& block : stack.blocks) fully_shard(*block, fsdp);
  fully_shard(stack, fsdp);
}

double mean_loss_backward(Stack& stack, const at::Tensor& tokens, const at::Tensor& labels) {
  const auto loss = stack(tokens, labels) / static_cast<double>(kRows * kLength);
  loss.backward();
  return loss.item<double>();
}

// The sum over the ranks of data parallelism.
double summed(double own, const Layout& layout, const MeshPtr& mesh) {
  const auto sum = at::full({1}, own, at::kDouble);
  comm::all_reduce(*mesh->world()->group(), sum).wait();
  return sum.item<double>() / static_cast<double>(layout.tensor_ranks);
}

TEST(FullyShardTensorParallel, TrainsAsOneRank) {
  for (const auto& layout : kLayouts) {
    on_threads(layout.ranks(), [&layout](const WorldPtr& world) {
      const auto mesh = layout.mesh(world);
      for (const bool sequence_parallel : {false, true}) {
        for (const bool tied : {false, true}) {
          Stack plain({.tied = tied}), sharded({.tied = tied});
          shard(sharded, layout, mesh, {.sequence_parallel = sequence_parallel, .tied = tied});
          set_gradient_divide_factor(sharded, 1);
          auto plain_optimizer = optim::make_adamw(plain, {.lr = 1e-2});
          auto optimizer = optim::make_adamw(sharded, {.lr = 1e-2});
          for (int step = 0; step < 3; ++step) {
            const auto [tokens, labels] = rows_of_text(step, kRows, kLength, 11);
            const double wanted = mean_loss_backward(plain, tokens, labels);
            const double own = mean_loss_backward(sharded, layout.own(tokens, mesh), layout.own(labels, mesh));
            EXPECT_NEAR(summed(own, layout, mesh), wanted, 1e-5 * wanted) << "step " << step;
            EXPECT_LT(distance(gradients_by_name(sharded, plain), gradients_by_name(plain, plain)), 2e-4);
            const double norm = optim::get_grad_norm(plain.parameters());
            EXPECT_NEAR(optim::get_grad_norm(sharded.parameters()), norm, 1e-5 * norm);
            plain_optimizer->step();
            optimizer->step();
            plain_optimizer->zero_grad();
            optimizer->zero_grad();
          }
        }
      }
    });
  }
}

TEST(FullyShardTensorParallel, ParametersHavePlacementsOnBothMeshDims) {
  on_threads(4, [](const WorldPtr& world) {
    const Layout layout{1, 2, 2};
    const auto mesh = layout.mesh(world);
    Stack stack({}), plain({});
    shard(stack, layout, mesh, {});
    const auto placements_of = [&](const at::Tensor& tensor) { return placements(tensor); };
    EXPECT_EQ(placements_of(stack.embed_tokens->weight), (Placements{StridedShard(0, 2), Shard(0)}));
    EXPECT_EQ(placements_of(stack.blocks[0]->mlp->down_proj->weight), (Placements{Shard(0), Shard(1)}));
    EXPECT_EQ(placements_of(stack.blocks[0]->mlp->down_proj->bias), (Placements{Shard(0), Replicate()}));
    EXPECT_EQ(placements_of(stack.norm->weight), (Placements{Shard(0), Replicate()}));
    EXPECT_EQ(*device_mesh(stack.norm->weight), *mesh);
    // 11 rows over tp: 6 and 5; over dp: 3 and 3, 3 and 2.
    EXPECT_EQ(to_local(stack.embed_tokens->weight).size(0), world->rank() == 3 ? 2 : 3);
    EXPECT_EQ(distance(whole_parameters(stack), whole_parameters(plain)), 0);
    EXPECT_EQ(fsdp_stats(stack).unsharded_bytes, 0);
  });
}

TEST(FullyShardTensorParallel, ForwardSeesTensorParallelDTensors) {
  on_threads(4, [](const WorldPtr& world) {
    const Layout layout{1, 2, 2};
    const auto mesh = layout.mesh(world);
    Stack stack({});
    shard(stack, layout, mesh, {.states_over_all = false});
    EXPECT_EQ(placements(stack.norm->weight), Placements{Shard(0)}) << "plain parameters over data parallelism alone";
    at::Tensor seen, seen_plain;
    stack.blocks[0]->mlp->up_proj->register_forward_pre_hook(
        [&](nn::Module&, nn::TensorRefs&) { seen = stack.blocks[0]->mlp->up_proj->weight; });
    stack.blocks[0]->norm->register_forward_pre_hook(
        [&](nn::Module&, nn::TensorRefs&) { seen_plain = stack.blocks[0]->norm->weight; });
    const auto [tokens, labels] = rows_of_text(0, kRows, kLength, 11);
    stack(tokens, labels).backward();
    EXPECT_EQ(placements(seen), Placements{Shard(0)});
    EXPECT_EQ(*device_mesh(seen), *mesh->slice({"tp"}));
    EXPECT_FALSE(is_dtensor(seen_plain));
    EXPECT_EQ(stack.blocks[0]->mlp->up_proj->weight.sizes(), at::IntArrayRef({10, 6}));
  });
}

// Micro-batches with and without synchronization add up their gradients, in bfloat16 too.
TEST(FullyShardTensorParallel, AccumulatesGradients) {
  on_threads(4, [](const WorldPtr& world) {
    const Layout layout{1, 2, 2};
    const auto mesh = layout.mesh(world);
    for (const bool each : {false, true}) {
      Stack plain({}), sharded({});
      shard(sharded, layout, mesh, {.sequence_parallel = true});
      set_gradient_divide_factor(sharded, 1);
      for (int step = 0; step < 2; ++step) {
        const auto [tokens, labels] = rows_of_text(step, kRows, kLength, 11);
        mean_loss_backward(plain, tokens, labels);
        set_requires_gradient_sync(sharded, each || step == 1);
        mean_loss_backward(sharded, layout.own(tokens, mesh), layout.own(labels, mesh));
      }
      EXPECT_LT(distance(gradients_by_name(sharded, plain), gradients_by_name(plain, plain)), 1e-5);
    }
  });
}

TEST(FullyShardTensorParallel, ComputesInTheDtypeOfItsPolicy) {
  on_threads(4, [](const WorldPtr& world) {
    const Layout layout{1, 2, 2};
    const auto mesh = layout.mesh(world);
    Stack plain({}), sharded({});
    shard(sharded, layout, mesh, {.policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    set_gradient_divide_factor(sharded, 1);
    const auto [tokens, labels] = rows_of_text(0, kRows, kLength, 11);
    const double wanted = mean_loss_backward(plain, tokens, labels);
    const double own = mean_loss_backward(sharded, layout.own(tokens, mesh), layout.own(labels, mesh));
    EXPECT_NEAR(summed(own, layout, mesh), wanted, 2e-2 * wanted);
    EXPECT_LT(distance(gradients_by_name(sharded, plain), gradients_by_name(plain, plain)), 0.1);
    EXPECT_EQ(sharded.parameters()[0].grad().scalar_type(), at::kFloat);
  });
}

TEST(FullyShardTensorParallel, StartsOnTheMetaDevice) {
  on_threads(4, [](const WorldPtr& world) {
    const Layout layout{1, 2, 2};
    const auto mesh = layout.mesh(world);
    Stack plain({}), sharded({});
    for (const auto& named : sharded.named_parameters(/*all=*/true)) {
      nn::Module::set_parameter(*named.slot,
                                at::empty(named.slot->parameter.sizes(), at::kMeta).set_requires_grad(true));
    }
    shard(sharded, layout, mesh, {});
    to_empty(sharded, test_device());
    {
      const at::NoGradGuard no_grad;
      const auto all = plain.named_parameters();
      size_t next = 0;
      for (const auto& named : sharded.named_parameters()) {
        const auto& tensor = named.slot->parameter;
        tensor.copy_(distribute_tensor(all[next++].slot->parameter.detach(), device_mesh(tensor), placements(tensor)));
      }
    }
    EXPECT_EQ(distance(whole_parameters(sharded), whole_parameters(plain)), 0);
    const auto [tokens, labels] = rows_of_text(0, kRows, kLength, 11);
    const at::NoGradGuard no_grad;
    EXPECT_NEAR(sharded(tokens, labels).item<double>(), plain(tokens, labels).item<double>(), 1e-3);
    EXPECT_EQ(fsdp_stats(sharded).piecewise_gathers, 0);
  });
}

TEST(FullyShardTensorParallel, RefusesMeshesThatAreNotSlicesOfOneMesh) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"dp", "tp"});
    const auto other = init_device_mesh(world, test_device_type(), {2, 2}, {"dp", "tp"});
    const auto turned = init_device_mesh(world, test_device_type(), {2, 2}, {"tp", "dp"});
    const auto refusal = [&](const MeshPtr& of_styles, const MeshPtr& of_fsdp) {
      Stack stack({});
      parallelize_module(stack, of_styles->slice({"tp"}), stack_plan(false));
      return error_of([&] { fully_shard(stack, {.mesh = of_fsdp->slice({"dp"})}); });
    };
    EXPECT_THAT(refusal(mesh, other), HasSubstr("no slices of one mesh"));
    EXPECT_THAT(refusal(turned, turned), HasSubstr("come before"));
    EXPECT_THAT(error_of([&] { concatenate(mesh->slice({"dp"}), mesh->slice({"dp"})); }), HasSubstr("both have"));
    EXPECT_EQ(*concatenate(mesh->slice({"tp"}), mesh->slice({"dp"})), *mesh);
  });
}

}  // namespace
}  // namespace tessera::testing
