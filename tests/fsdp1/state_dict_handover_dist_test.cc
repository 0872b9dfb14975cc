// Tests the state dict functions for models under FSDP1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/fsdp1/state/state_dict_type.h"
#include "tessera/state/cpu_state_dict.h"
#include "tessera/state/state_dict.h"
#include "tests/fsdp1/net.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Fsdp1StateDict, MatchesThePlainModelAndLoadsBack) {
  Fsdp1Net plain;
  const auto plain_optimizer = adam_of(plain);
  train(plain, *plain_optimizer, 2);
  const auto weights = get_model_state_dict(plain);
  const auto states = get_optimizer_state_dict(plain, {plain_optimizer.get()});
  for (const bool original : {false, true}) {
    on_ranks(2, [&](const WorldPtr& world) {
      Fsdp1Net net(11);
      wrap(net, world->group(), Wrapping::kEach, original);
      const auto optimizer = adam_of(net);
      for (const bool broadcast : {false, true}) {
        for (const bool flat : {false, true}) {
          train(net, *optimizer, 1);
          const bool has = !broadcast || world->rank() == 0;
          const StateDictOptions options{
              .full_state_dict = true, .broadcast_from_rank0 = broadcast, .flatten_optimizer_state_dict = flat};
          const auto given =
              flat ? get_optimizer_state_dict(plain, {plain_optimizer.get()}, {.flatten_optimizer_state_dict = true})
                   : states;
          const auto keys =
              set_state_dict(net, {optimizer.get()}, has ? weights : StateDict(), has ? given : StateDict(), options);
          EXPECT_THAT(keys.missing_keys, IsEmpty());
          const auto whole = get_state_dict(net, {optimizer.get()}, {.full_state_dict = true});
          EXPECT_EQ(state_difference(whole.model, weights), "");
          EXPECT_EQ(state_difference(whole.optimizer.at("state"), states.at("state")), "");
        }
      }
      const auto on_rank_0 = get_state_dict(net, {optimizer.get()}, {.full_state_dict = true, .cpu_offload = true});
      EXPECT_EQ(on_rank_0.model.empty(), world->rank() != 0);
      EXPECT_EQ(on_rank_0.optimizer.empty(), world->rank() != 0);
      const auto parts = get_state_dict(net, {optimizer.get()});
      EXPECT_TRUE(parts.model.at("first.weight").is_sharded());
      train(net, *optimizer, 1);
      set_state_dict(net, {optimizer.get()}, parts.model, parts.optimizer);
      EXPECT_EQ(state_difference(get_model_state_dict(net, {.full_state_dict = true}), weights), "");
      EXPECT_THAT(thrown_by([&] {
                    get_optimizer_state_dict(net, {optimizer.get(), optimizer.get()});
                  }),
                  HasSubstr("found 2 optimizers"));
      EXPECT_THAT(thrown_by([&] { get_model_state_dict(net, {.submodules = {net.first.get()}}); }),
                  HasSubstr("a model under FSDP1 takes neither fqn_modifier nor submodules"));
    });
  }
}

// Freezes parameters of a wrapped model.
void freeze(Fsdp1Net& net, const std::string& prefix) {
  for (const auto& parameter : net.named_parameters()) {
    if (parameter.name.starts_with(prefix)) parameter.slot->parameter.set_requires_grad(false);
  }
}

StateDict without(StateDict dict, const std::vector<std::string>& keys) {
  for (const auto& key : keys) dict.erase(key);
  return dict;
}

TEST(Fsdp1StateDict, IgnoreFrozenParamsAllowsOnlyMissingFrozenParameters) {
  const auto weights = get_model_state_dict(*std::make_unique<Fsdp1Net>());
  for (const bool original : {false, true}) {
    on_ranks(2, [&](const WorldPtr& world) {
      Fsdp1Net net(11);
      wrap(net, world->group(), Wrapping::kEach, original);
      freeze(net, "first.");
      const StateDictOptions options{.full_state_dict = true, .ignore_frozen_params = true};
      const auto trained = get_model_state_dict(net, options);
      EXPECT_EQ(keys_of(trained).size(), weights.size() - 2);
      EXPECT_FALSE(trained.contains("first.weight"));
      const auto given = without(weights, {"first.weight", "first.bias"});
      EXPECT_THAT(set_model_state_dict(net, given, options).missing_keys, IsEmpty());
      EXPECT_EQ(state_difference(get_model_state_dict(net, options), given), "");
      const auto message = [&](const StateDict& dict, const StateDictOptions& how) {
        return thrown_by([&] { set_model_state_dict(net, dict, how); });
      };
      EXPECT_THAT(message(given, {.full_state_dict = true}), HasSubstr("Missing key(s) in state_dict: 'first.weight'"));
      EXPECT_THAT(message(without(given, {"last.bias"}), options),
                  HasSubstr("Missing key(s) in state_dict: 'last.bias'"));
      auto more = given;
      more.set("extra", at::zeros({1}));
      EXPECT_THAT(message(more, options), HasSubstr("Unexpected key(s) in state_dict: 'extra'"));
    });
  }
}

TEST(Fsdp1StateDict, StrictRefusesMissingOptimizerStates) {
  Fsdp1Net plain;
  const auto plain_optimizer = adam_of(plain);
  train(plain, *plain_optimizer, 2);
  const auto all = get_optimizer_state_dict(plain, {plain_optimizer.get()});
  for (const bool original : {false, true}) {
    on_ranks(2, [&](const WorldPtr& world) {
      Fsdp1Net net(11);
      wrap(net, world->group(), Wrapping::kEach, original);
      const auto optimizer = adam_of(net);
      // A flat parameter has one state: it is in the dict for all its members or for none.
      const std::vector<std::string> missing =
          original ? std::vector<std::string>{"last.bias"} : std::vector<std::string>{"last.weight", "last.bias"};
      auto some = all;
      some.set("state", without(all.at("state").dict(), missing));
      for (const bool broadcast : {false, true}) {
        StateDictOptions options{.full_state_dict = true, .broadcast_from_rank0 = broadcast};
        EXPECT_THAT(thrown_by([&] { set_optimizer_state_dict(net, {optimizer.get()}, some, options); }),
                    HasSubstr("Missing optimizer state for parameter '" + missing[0] + "'"));
        options.strict = false;
        train(net, *optimizer, 1);
        EXPECT_EQ(thrown_by([&] { set_optimizer_state_dict(net, {optimizer.get()}, some, options); }), "");
        const auto states = get_optimizer_state_dict(net, {optimizer.get()}, {.full_state_dict = true}).at("state");
        EXPECT_EQ(states.dict().at("last.bias").dict().at("step").tensor().item<float>(), 0);
        EXPECT_EQ(state_difference(without(states.dict(), missing), some.at("state")), "");
      }
    });
  }
}

TEST(Fsdp1StateDict, AnErrorOnRank0IsAnErrorOnAllRanks) {
  Fsdp1Net plain;
  const auto plain_optimizer = adam_of(plain);
  auto flat = get_optimizer_state_dict(plain, {plain_optimizer.get()}, {.flatten_optimizer_state_dict = true});
  flat.set("param_groups.first.bias.lr", 7.0);
  on_ranks(2, [&](const WorldPtr& world) {
    Fsdp1Net net;
    wrap(net, world->group(), Wrapping::kEach, false);
    const auto optimizer = adam_of(net);
    const auto message = thrown_by([&] {
      set_optimizer_state_dict(net, {optimizer.get()}, world->rank() == 0 ? flat : StateDict(),
                               {.full_state_dict = true, .broadcast_from_rank0 = true});
    });
    EXPECT_THAT(message, HasSubstr("rank 0: "));
    EXPECT_THAT(message, HasSubstr("same parameter group should have the same saved param_group value"));
    const auto before = get_state_dict_type(net);
    if (world->rank() == 1) set_state_dict_type(*net.middle, {.type = StateDictType::kLocal});
    EXPECT_THAT(thrown_by([&] { get_model_state_dict(net); }), HasSubstr("rank 1: "));
    if (world->rank() == 1) set_state_dict_type(*net.middle, before);
    EXPECT_TRUE(get_state_dict_type(net) == before);
  });
}

TEST(Fsdp1StateDict, CpuCopyIsEmptyOnRanksWithoutAShard) {
  on_ranks(2, [](const WorldPtr& world) {
    Fsdp1Net net;
    wrap(net, world->group(), Wrapping::kEach, false);
    const auto copies = get_cpu_state_dict(get_model_state_dict(net));
    const auto& one_row = copies.at("last.weight").tensor();
    EXPECT_EQ(one_row.numel(), world->rank() == 0 ? 7 : 0);
    EXPECT_EQ(one_row.scalar_type(), at::kFloat);
  });
}

}  // namespace
}  // namespace tessera::testing
