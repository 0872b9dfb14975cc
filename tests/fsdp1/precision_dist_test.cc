// Tests that the state of FSDP1 units with mixed precision, or with replicas, is whole and in full precision.
#include <gmock/gmock.h>

#include "tessera/fsdp1/state/model_state_dict.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tests/fsdp1/net.h"

namespace tessera::testing {
namespace {

StateDict full_weights(nn::Module& net) {
  const StateDictTypeScope scope(net, {.type = StateDictType::kFull});
  return fsdp1_state_dict(net);
}

StateDict weights_of(Fsdp1Net& net) {
  StateDict out;
  for (const auto& named : net.named_parameters(/*all=*/true)) out.set(named.name, named.slot->parameter.detach());
  out.set("mean", net.mean);
  return out;
}

TEST(Fsdp1MixedPrecisionState, IsSavedAndLoadedInFullPrecision) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      Fsdp1Net plain, model, other(9);
      for (auto* each : {&model, &other}) {
        wrap_fsdp1(*each, {.group = world->group(),
                           .use_orig_params = use_orig_params,
                           .mixed_precision = {.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}});
        (*each)(at::ones({4, 3})).sum().backward();
      }
      EXPECT_EQ(model.mean.scalar_type(), at::kBFloat16);
      const auto saved = full_weights(model);
      for (const auto& [key, value] : weights_of(plain)) {
        const auto& found = saved.at(to_string(key)).tensor();
        EXPECT_EQ(found.scalar_type(), at::kFloat) << to_string(key);
        const auto wanted = to_string(key) == "mean" ? plain.mean.to(at::kBFloat16).to(at::kFloat) : value.tensor();
        EXPECT_TRUE(found.equal(wanted)) << to_string(key);
      }
      const StateDictTypeScope scope(other, {.type = StateDictType::kFull});
      load_fsdp1_state_dict(other, saved);
      EXPECT_EQ(other.mean.scalar_type(), at::kBFloat16);
      EXPECT_EQ(state_difference(fsdp1_state_dict(other), saved), "");
    }
  });
}

TEST(Fsdp1HybridShardState, IsFullOnEveryReplica) {
  on_ranks(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"replicate", "shard"});
    for (const bool use_orig_params : {false, true}) {
      Fsdp1Net plain, model;
      const Fsdp1Options options{.group = mesh->group("shard"),
                                 .sharding_strategy = ShardingStrategy::kHybridShard,
                                 .use_orig_params = use_orig_params,
                                 .replicate_group = mesh->group("replicate")};
      wrap_fsdp1(*model.middle, options);
      wrap_fsdp1(model, options);
      const auto plain_optimizer = adam_of(plain), optimizer = adam_of(model);
      train(plain, *plain_optimizer, 2);
      train(model, *optimizer, 2);
      EXPECT_EQ(state_difference(full_weights(model), weights_of(plain)), "");
      const StateDictTypeScope scope(model, {.type = StateDictType::kFull});
      const auto states = optim_state_dict(model, *optimizer);
      const auto& moment = states.at("state").dict().at("last.weight").dict().at("exp_avg").tensor();
      EXPECT_TRUE(moment.allclose(plain_optimizer->state("last.weight").at("exp_avg"), 1e-4, 1e-6));
    }
  });
}

}  // namespace
}  // namespace tessera::testing
