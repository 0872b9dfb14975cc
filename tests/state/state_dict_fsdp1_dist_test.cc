// get_ and set_ of models under FSDP1.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/state/state_dict.h"
#include "tests/state/fsdp1_net.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Fsdp1StateDict, IsThatOfThePlainModelAndLoadsAgain) {
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
          EXPECT_THAT(keys.missing, IsEmpty());
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
    });
  }
}

}  // namespace
}  // namespace tessera::testing
