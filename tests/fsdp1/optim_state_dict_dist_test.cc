// Tests the optimizer state dicts of FSDP1 of every type against those of one device: values, loading under another
// wrapping, groups, and errors on all ranks.
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/fsdp1/state/legacy_optim_state_dict.h"
#include "tessera/fsdp1/state/model_state_dict.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tessera/fsdp1/state/verify_osd_by_load.h"
#include "tessera/state/sharded_tensor.h"
#include "tests/fsdp1/net.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

struct OneDevice {
  Fsdp1Net net;
  std::unique_ptr<optim::Optimizer> optimizer = adam_of(net);
  explicit OneDevice(int steps = 0) { train(net, *optimizer, steps); }
};

struct Wrapped {
  Fsdp1Net net;
  std::unique_ptr<optim::Optimizer> optimizer;
  Wrapped(const std::shared_ptr<comm::Group>& group, Wrapping wrapping, bool use_orig_params, int steps = 0,
          ShardingStrategy strategy = ShardingStrategy::kFullShard) {
    wrap(net, group, wrapping, use_orig_params, strategy);
    optimizer = adam_of(net);
    train(net, *optimizer, steps);
  }
  StateDict saved(StateDictType type = StateDictType::kFull, MeshPtr mesh = {}) {
    const auto scope = state_dict_type(net, {.type = type, .device_mesh = std::move(mesh)});
    return optim_state_dict(net, *optimizer);
  }
  StateDict to_load(const StateDict& dict, bool directly = false) {
    return optim_state_dict_to_load(net, *optimizer, dict, {.load_directly = directly});
  }
  StateDict own() const { return optimizer_state_dict(*optimizer); }
};

// Returns the dict as optim_state_dict_to_load gives it: parameters without elements on this rank have no entry.
StateDict without_empty_states(const StateDict& raw) {
  StateDict kept;
  for (const auto& [key, state] : raw.at("state").dict()) {
    if (state.dict().at("exp_avg").tensor().numel() > 0) kept.set(key, state);
  }
  return {{"state", kept}, {"param_groups", raw.at("param_groups")}};
}

void expect_right(const StateDict& saved, const std::shared_ptr<comm::Group>& group) {
  OneDevice reference(3), twin;
  verify_osd_by_load(twin.net, *twin.optimizer, saved, *reference.optimizer, {.rtol = 1e-4, .group = group});
}

class Fsdp1OptimStateDictLayouts : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  static int ranks() { return std::get<0>(GetParam()); }
  static bool use_orig_params() { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(, Fsdp1OptimStateDictLayouts,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()), [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "RanksOriginal" : "RanksFlat");
                         });

TEST_P(Fsdp1OptimStateDictLayouts, EveryTypeMatchesOneDevice) {
  on_ranks(ranks(), [](const WorldPtr& world) {
    const auto group = world->group();
    Wrapped model(group, Wrapping::kEach, use_orig_params(), 3);
    expect_right(model.saved(), group);
    expect_right(model.saved(StateDictType::kSharded), group);
    expect_right(model.saved(StateDictType::kLocal), group);
    expect_right(model.saved(StateDictType::kSharded, init_device_mesh(world, "cpu", {world->size()}, {"dp"})), group);
  });
}

TEST_P(Fsdp1OptimStateDictLayouts, LoadsIntoAnotherWrapping) {
  on_ranks(ranks(), [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {"dp"});
    Wrapped from(world->group(), Wrapping::kEach, use_orig_params(), 3);
    const std::vector<StateDict> saved = {from.saved(), from.saved(StateDictType::kSharded),
                                          from.saved(StateDictType::kSharded, mesh)};
    for (const bool original : {false, true}) {
      Wrapped trained(world->group(), Wrapping::kMiddle, original, 3);
      for (const auto& dict : saved) {
        Wrapped fresh(world->group(), Wrapping::kMiddle, original);
        EXPECT_EQ(state_difference(fresh.to_load(dict, /*directly=*/true), without_empty_states(trained.own())), "");
        EXPECT_EQ(state_difference(without_empty_states(fresh.own()), without_empty_states(trained.own())), "");
        EXPECT_EQ(fresh.optimizer->steps(), 3);
      }
    }
  });
}

TEST(Fsdp1OptimStateDict, LoadsOnHalfTheRanks) {
  on_ranks(4, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      const auto full = Wrapped(world->group(), Wrapping::kEach, original, 3).saved();
      if (world->rank() > 1) continue;
      const auto half = world->new_group({0, 1}, original ? "half_original" : "half_flat");
      Wrapped trained(half, Wrapping::kRoot, original, 3), fresh(half, Wrapping::kRoot, original);
      EXPECT_EQ(state_difference(fresh.to_load(full, /*directly=*/true), without_empty_states(trained.own())), "");
      EXPECT_EQ(state_difference(fresh.to_load(full), without_empty_states(trained.own())), "");
    }
  });
}

TEST(Fsdp1OptimStateDict, Rank0OnlyIsEmptyOnOtherRanksAndLoadsOnAllRanks) {
  on_ranks(3, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Wrapped trained(world->group(), Wrapping::kEach, original, 3), fresh(world->group(), Wrapping::kMiddle, original);
      const StateDictSettings settings{.optim_state_dict_config = FullOptimStateDictConfig{.rank0_only = true}};
      const StateDictTypeScope saving(trained.net, settings), loading(fresh.net, settings);
      const auto saved = optim_state_dict(trained.net, *trained.optimizer);
      EXPECT_EQ(saved.empty(), world->rank() != 0);
      if (world->rank() == 0) expect_right(saved, nullptr);
      Wrapped expected(world->group(), Wrapping::kMiddle, original, 3);
      // Only rank 0's argument is read.
      const StateDict passed = world->rank() == 1 ? StateDict{{"state", 3}} : saved;
      EXPECT_EQ(state_difference(fresh.to_load(passed), without_empty_states(expected.own())), "");
      if (world->rank() == 0) expect_right(saved, nullptr);  // the argument is unchanged
    }
  });
}

TEST(Fsdp1OptimStateDict, ChunksMatchTorchChunk) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Wrapped model(world->group(), Wrapping::kEach, original, 1);
      const auto saved = model.saved(StateDictType::kSharded);
      const auto& states = saved.at("state").dict();
      const auto& first = *states.at("first.weight").dict().at("exp_avg").sharded();
      EXPECT_EQ(first.size, (std::vector<int64_t>{5, 3}));
      ASSERT_EQ(first.shards_metadata.size(), 2U);
      EXPECT_EQ(first.shards_metadata[1].shard_offsets, (std::vector<int64_t>{3, 0}));
      EXPECT_EQ(first.shards_metadata[1].placement, "rank:1/cpu");
      EXPECT_EQ(first.local_shards.at(0).tensor.size(0), world->rank() == 0 ? 3 : 2);
      const auto& one_row = *states.at("last.weight").dict().at("exp_avg").sharded();
      EXPECT_EQ(one_row.shards_metadata.size(), 1U);
      EXPECT_EQ(one_row.local_shards.size(), world->rank() == 0 ? 1U : 0U);
      EXPECT_EQ(states.contains("again"), false);  // the second name of `scale`
    }
  });
}

TEST(Fsdp1OptimStateDict, ParamGroupsNameOriginalParameters) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Wrapped model(world->group(), Wrapping::kEach, original, 1);
      auto raw = model.own();
      const auto saved = model.saved();
      std::vector<std::string> names;
      for (const auto& group : saved.at("param_groups").list()) {
        for (const auto& name : group.dict().at("params").list()) names.push_back(name.string());
      }
      EXPECT_THAT(names, ::testing::UnorderedElementsAre("scale", "first.weight", "first.bias", "middle.weight",
                                                         "middle.bias", "last.weight", "last.bias"));
      raw.erase("param_groups");
      const auto scope = state_dict_type(model.net, {});
      EXPECT_FALSE(optim_state_dict(model.net, *model.optimizer, {.optim_state_dict = raw}).contains("param_groups"));
    }
  });
}

TEST(Fsdp1OptimStateDict, IsEmptyWithoutState) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Wrapped model(world->group(), Wrapping::kEach, original);
      auto raw = model.own();
      raw.set("state", StateDict{});
      const auto saved = optim_state_dict(model.net, *model.optimizer, {.optim_state_dict = raw});
      EXPECT_TRUE(saved.at("state").dict().empty());
      EXPECT_TRUE(model.to_load(saved).at("state").dict().empty());
    }
  });
}

std::unique_ptr<optim::Optimizer> adam_of_groups(Fsdp1Net& net, const std::vector<std::string>& first_group) {
  std::vector<std::string> others;
  for (const auto& parameter : net.named_parameters()) {
    if (std::ranges::find(first_group, parameter.name) == first_group.end()) others.push_back(parameter.name);
  }
  return optim::make_adamw(
      net, {.lr = 0.05, .weight_decay = 0, .groups = {{.names = first_group}, {.names = std::move(others)}}});
}

TEST(Fsdp1OptimStateDict, LoadsIntoOtherParamGroups) {
  on_ranks(2, [](const WorldPtr& world) {
    Fsdp1Net from(3), to(3);
    for (auto* net : {&from, &to}) wrap(*net, world->group(), Wrapping::kEach, /*use_orig_params=*/true);
    const auto optimizer = adam_of_groups(from, {"first.weight", "first.bias"}),
               other = adam_of_groups(to, {"first.weight", "last.bias"});
    train(from, *optimizer, 3);
    const auto saved = optim_state_dict(from, *optimizer);
    optim_state_dict_to_load(to, *other, saved, {.load_directly = true});
    EXPECT_EQ(state_difference(optim_state_dict(to, *other).at("state"), saved.at("state")), "");

    auto two_rates = saved;
    two_rates.at("param_groups").list()[0].dict().set("lr", 0.1);
    EXPECT_THAT(message_of([&] { optim_state_dict_to_load(to, *other, two_rates); }),
                HasSubstr("but were saved in groups with different hyper-parameters"));
  });
}

TEST(Fsdp1OptimStateDict, LoadDoesNotDependOnTheOrderOfKeys) {
  on_ranks(2, [](const WorldPtr& world) {
    Wrapped from(world->group(), Wrapping::kEach, true, 3), to(world->group(), Wrapping::kMiddle, true);
    auto saved = from.saved(StateDictType::kSharded);
    if (world->rank() == 1) {
      for (auto& [name, state] : saved.at("state").dict()) {
        const StateDict before = state.dict();
        state = StateDict{
            {"exp_avg_sq", before.at("exp_avg_sq")}, {"exp_avg", before.at("exp_avg")}, {"step", before.at("step")}};
      }
    }
    to.to_load(saved, /*directly=*/true);
    EXPECT_EQ(state_difference(to.saved().at("state"), from.saved().at("state")), "");
  });
}

TEST(Fsdp1OptimStateDict, OmitsParametersFrozenAfterWrapping) {
  on_ranks(2, [](const WorldPtr& world) {
    Fsdp1Net net, fresh;
    for (auto* each : {&net, &fresh}) {
      wrap(*each, world->group(), Wrapping::kEach, /*use_orig_params=*/true);
      for (const auto& parameter : each->named_parameters()) {
        if (parameter.name == "last.bias") parameter.slot->parameter.set_requires_grad(false);
      }
    }
    const auto optimizer = adam_of(net), other = adam_of(fresh);
    train(net, *optimizer, 2);
    const auto saved = optim_state_dict(net, *optimizer);
    EXPECT_FALSE(saved.at("state").dict().contains("last.bias"));
    optim_state_dict_to_load(fresh, *other, saved, {.load_directly = true});
    EXPECT_EQ(state_difference(optim_state_dict(fresh, *other).at("state"), saved.at("state")), "");
  });
}

TEST(Fsdp1OptimStateDict, AcceptsNamedOptimizersAndUserState) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Wrapped model(world->group(), Wrapping::kEach, original, 3);
      const auto names = optimizer_parameter_names(*model.optimizer);
      const auto raw = model.own();
      StateDict by_name;
      for (const auto& [key, state] : raw.at("state").dict()) {
        by_name.set(names[static_cast<size_t>(std::get<int64_t>(key))], state);
      }
      by_name.set("epoch", 5);
      const StateDict named{{"state", by_name}};
      auto saved = optim_state_dict(model.net, *model.optimizer, {.optim_state_dict = named});
      EXPECT_EQ(saved.at("state").dict().at("epoch").integer(), 5);
      const auto loaded = optim_state_dict_to_load(model.net, *model.optimizer, saved, {.is_named_optimizer = true});
      // Named optimizers also want the state of parameters without elements on a rank.
      EXPECT_EQ(state_difference(loaded.at("state"), by_name), "");
      saved.at("state").dict().erase("epoch");
      expect_right(saved, world->group());
    }
  });
}

TEST(Fsdp1OptimStateDict, IsUnshardedOnAllRanksWithNoShard) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Wrapped model(world->group(), Wrapping::kEach, original, 3, ShardingStrategy::kNoShard);
      expect_right(model.saved(), world->group());
      const auto sharded = model.saved(StateDictType::kSharded);
      EXPECT_TRUE(sharded.at("state").dict().at("first.weight").dict().at("exp_avg").is_tensor());
      Wrapped fresh(world->group(), Wrapping::kMiddle, original, 0, ShardingStrategy::kNoShard);
      Wrapped chunks(world->group(), Wrapping::kMiddle, original, 3);
      Wrapped expected(world->group(), Wrapping::kMiddle, original, 3, ShardingStrategy::kNoShard);
      EXPECT_EQ(state_difference(fresh.to_load(sharded, true), expected.own()), "");
      EXPECT_EQ(state_difference(fresh.to_load(chunks.saved(StateDictType::kSharded), true), expected.own()), "");
    }
  });
}

TEST(Fsdp1OptimStateDict, IncludesTheStateOfParametersOutsideUnits) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Fsdp1Net net, fresh;
      for (auto* each : {&net, &fresh}) {
        wrap_fsdp1(*each->first, {.group = world->group(), .use_orig_params = original});
      }
      const auto optimizer = adam_of(net), fresh_optimizer = adam_of(fresh);
      train(net, *optimizer, 3);
      for (const auto type : {StateDictType::kFull, StateDictType::kSharded}) {
        const StateDictTypeScope scope(net, {.type = type});
        const auto saved = optim_state_dict(net, *optimizer);
        EXPECT_TRUE(saved.at("state").dict().at("last.weight").dict().at("exp_avg").is_tensor());
        expect_right(saved, world->group());
        EXPECT_EQ(state_difference(optim_state_dict_to_load(fresh, *fresh_optimizer, saved),
                                   without_empty_states(optimizer_state_dict(*optimizer))),
                  "");
        // PyTorch wants exactly one name of a shared parameter. Here the dict has its other name.
        auto renamed = saved;
        auto& states = renamed.at("state").dict();
        states.set("again", states.at("scale"));
        states.erase("scale");
        for (auto& name : renamed.at("param_groups").list()[0].dict().at("params").list()) {
          if (name.string() == "scale") name = "again";
        }
        EXPECT_EQ(state_difference(optim_state_dict_to_load(fresh, *fresh_optimizer, renamed),
                                   without_empty_states(optimizer_state_dict(*optimizer))),
                  "");
      }
    }
  });
}

TEST(Fsdp1OptimStateDict, AnErrorOnOneRankIsAnErrorOnAllRanks) {
  on_ranks(3, [](const WorldPtr& world) {
    Wrapped flat(world->group(), Wrapping::kEach, false, 2), original(world->group(), Wrapping::kEach, true, 2);
    const auto save = [&](Wrapped& model, const std::function<void(StateDict&)>& change) {
      StateDict raw = model.own();
      if (world->rank() == 1) change(raw.at("state").dict());
      return message_of([&] { optim_state_dict(model.net, *model.optimizer, {.optim_state_dict = raw}); });
    };
    EXPECT_THAT(save(flat, [](StateDict& states) { states.erase(1); }),
                HasSubstr("but some ranks are missing some of those states\nRank 1 is missing states for the "
                          "parameters: [('first.weight', 'first.bias')]"));
    EXPECT_THAT(save(flat, [](StateDict& states) { states.at(0).dict().set("step", at::zeros({})); }),
                HasSubstr("Rank 1 has different values for step"));
    EXPECT_THAT(save(flat, [](StateDict& states) { states.at(0).dict().erase("exp_avg"); }),
                HasSubstr("Rank 1 has different values for exp_avg: nothing"));
    EXPECT_THAT(save(flat, [](StateDict& states) { states.at(0).dict().set("exp_avg", at::zeros({99})); }),
                HasSubstr("found shape 99, expected the"));
    EXPECT_THAT(save(flat, [](StateDict& states) { states.set(17, StateDict{}); }),
                HasSubstr("entry for parameter 17"));
    EXPECT_THAT(save(original,
                     [](StateDict& states) {
                       for (auto& [key, state] : states) {
                         if (state.dict().at("exp_avg").tensor().numel() > 0) {
                           state.dict().set("exp_avg", state.dict().at("exp_avg").tensor().to(at::kDouble));
                         }
                       }
                     }),
                HasSubstr("different values for exp_avg"));
    auto missing = original.own();
    missing.at("state").dict().erase(1);
    EXPECT_THAT(message_of([&] { optim_state_dict(original.net, *original.optimizer, {.optim_state_dict = missing}); }),
                HasSubstr("is not in the optimizer state. The FSDPParamInfo has the param keys ["));

    for (auto* model : {&flat, &original}) {
      const auto load = [&](const std::function<void(StateDict&)>& change) {
        StateDict saved = model->saved();
        if (world->rank() == 2) change(saved.at("state").dict());
        return message_of([&] { model->to_load(saved); });
      };
      EXPECT_THAT(load([](StateDict& states) { states.at("first.bias").dict().set("exp_avg", at::zeros({4})); }),
                  HasSubstr("Tensor optimizer state does not have same shape as its parameter: [4] [5]"));
      EXPECT_THAT(load([](StateDict& states) { states.erase("last.weight"), states.erase("last.bias"); }),
                  HasSubstr("the ranks differ"));
      EXPECT_THAT(load([](StateDict& states) {
                    for (const char* name : {"last.weight", "last.bias"}) states.at(name).dict().set("step", 3);
                  }),
                  HasSubstr("the ranks differ"));
    }
    EXPECT_EQ(save(flat, [](StateDict&) {}), "");
  });
}

TEST(Fsdp1OptimStateDict, AnInvalidDictOnRank0IsAnErrorOnAllRanks) {
  on_ranks(2, [](const WorldPtr& world) {
    Wrapped model(world->group(), Wrapping::kEach, false, 1);
    const auto scope =
        state_dict_type(model.net, {.optim_state_dict_config = FullOptimStateDictConfig{.rank0_only = true}});
    const auto message = message_of([&] { model.to_load({}); });
    EXPECT_THAT(message, HasSubstr("must have the keys \"state\""));
    EXPECT_THAT(message, HasSubstr("rank 0"));
    const auto sharded = [&] {
      const StateDictTypeScope inner(model.net, {.type = StateDictType::kSharded});
      return optim_state_dict(model.net, *model.optimizer);
    }();
    EXPECT_THAT(message_of([&] { model.to_load(sharded); }), HasSubstr("ShardedTensor"));
  });
}

TEST(Fsdp1OptimStateDict, DeprecatedFunctionsGiveTheSameResults) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Wrapped model(world->group(), Wrapping::kEach, original, 3);
      const auto full = full_optim_state_dict(model.net, *model.optimizer);
      EXPECT_EQ(full.empty(), world->rank() != 0);
      const auto everywhere = full_optim_state_dict(model.net, *model.optimizer, {.rank0_only = false});
      const auto sharded = sharded_optim_state_dict(model.net, *model.optimizer);
      Wrapped fresh(world->group(), Wrapping::kMiddle, original),
          expected(world->group(), Wrapping::kMiddle, original, 3);
      const auto wanted = without_empty_states(expected.own());
      auto& optimizer = *fresh.optimizer;
      EXPECT_EQ(state_difference(shard_full_optim_state_dict(everywhere, fresh.net, optimizer), wanted), "");
      EXPECT_EQ(state_difference(flatten_sharded_optim_state_dict(sharded, fresh.net, optimizer), wanted), "");
      const auto passed = world->rank() == 0 ? std::optional(full) : std::nullopt;
      EXPECT_EQ(state_difference(scatter_full_optim_state_dict(passed, fresh.net, optimizer), wanted), "");
      const auto by_input =
          full_optim_state_dict(model.net, *model.optimizer,
                                {.rank0_only = false, .optim_input = optimizer_parameter_names(*model.optimizer)});
      EXPECT_EQ(state_difference(by_input, everywhere), "");
    }
  });
}

TEST(Fsdp1OptimStateDict, ToggledParametersKeepTheirStepCounts) {
  on_ranks(2, [](const WorldPtr& world) {
    Fsdp1Net net, twin;
    wrap(net, world->group(), Wrapping::kMiddle, /*use_orig_params=*/true);
    const auto optimizer = adam_of(net), twin_optimizer = adam_of(twin);
    for (int step = 0; step < 4; ++step) {
      for (auto* each : {&net, &twin}) {
        for (const auto& parameter : each->named_parameters()) {
          if (parameter.name == "first.weight") parameter.slot->parameter.set_requires_grad(step % 2 == 1);
        }
      }
      train(net, *optimizer, 1, step);
      train(twin, *twin_optimizer, 1, step);
    }
    const auto saved = optim_state_dict(net, *optimizer);
    EXPECT_EQ(saved.at("state").dict().at("first.weight").dict().at("step").tensor().item<double>(), 2);
    EXPECT_EQ(saved.at("state").dict().at("first.bias").dict().at("step").tensor().item<double>(), 4);
    OneDevice loaded;
    verify_osd_by_load(loaded.net, *loaded.optimizer, saved, *twin_optimizer, {.rtol = 1e-4, .group = world->group()});
    const auto before = optimizer_state_dict(*optimizer);
    EXPECT_EQ(state_difference(optim_state_dict_to_load(net, *optimizer, saved), without_empty_states(before)), "");
  });
}

TEST(StateDictTypeScope, RestoresTheTypeAfterAnException) {
  on_ranks(2, [](const WorldPtr& world) {
    Wrapped model(world->group(), Wrapping::kEach, false);
    const auto before = get_state_dict_type(model.net);
    EXPECT_EQ(before.type, StateDictType::kFull);
    try {
      const auto scope = state_dict_type(model.net, {.type = StateDictType::kSharded});
      EXPECT_EQ(get_state_dict_type(*model.net.middle).type, StateDictType::kSharded);
      throw std::runtime_error("save failed");
    } catch (const std::runtime_error&) {
    }
    EXPECT_TRUE(get_state_dict_type(model.net) == before);
    set_state_dict_type(*model.net.middle, {.type = StateDictType::kLocal});
    EXPECT_THAT(message_of([&] { get_state_dict_type(model.net); }),
                HasSubstr("All FSDP modules should have the same state_dict_type"));
  });
}

TEST(StateDictTypeScope, RefusesConfigsOfAnotherType) {
  EXPECT_THAT(message_of([] {
                complete_settings({.type = StateDictType::kSharded, .state_dict_config = FullStateDictConfig{}});
              }),
              HasSubstr("Expected state_dict_config of type ShardedStateDictConfig"));
  EXPECT_THAT(
      message_of([] {
        complete_settings({.type = StateDictType::kFull, .optim_state_dict_config = LocalOptimStateDictConfig{}});
      }),
      HasSubstr("Expected optim_state_dict_config of type FullOptimStateDictConfig"));
  Fsdp1Net plain;
  EXPECT_THAT(message_of([&] { get_state_dict_type(plain); }), HasSubstr("no module of this model is wrapped"));
}

}  // namespace
}  // namespace tessera::testing
