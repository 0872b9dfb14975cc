// Tests the model state dicts of FSDP1 of every type (full, sharded, local): values, loading under another wrapping,
// names, and errors on all ranks.
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/fsdp1/state/model_state_dict.h"
#include "tessera/state/sharded_tensor.h"
#include "tests/fsdp1/net.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

StateDict plain_weights(const Fsdp1Net& net) {
  return {{"scale", net.scale.detach()},
          {"again", net.scale.detach()},
          {"first.weight", net.first->weight.detach()},
          {"first.bias", net.first->bias.detach()},
          {"middle.weight", net.middle->weight.detach()},
          {"middle.bias", net.middle->bias.detach()},
          {"last.weight", net.last->weight.detach()},
          {"last.bias", net.last->bias.detach()},
          {"mean", net.mean}};
}

StateDict whole_values(const StateDict& dict) {
  StateDict whole;
  for (const auto& [key, value] : dict) {
    if (value.is_sharded()) {
      whole.set(key, all_gather_sharded_tensor(*value.sharded()));
    } else {
      whole.set(key, is_dtensor(value.tensor()) ? full_tensor(value.tensor()) : value.tensor());
    }
  }
  return whole;
}

StateDict saved(nn::Module& net, StateDictType type, MeshPtr mesh = {}) {
  const StateDictTypeScope scope(net, {.type = type, .device_mesh = std::move(mesh)});
  return fsdp1_state_dict(net);
}
IncompatibleKeys load(nn::Module& net, const StateDict& dict, StateDictType type = StateDictType::kFull,
                      bool strict = true) {
  const StateDictTypeScope scope(net, {.type = type});
  return load_fsdp1_state_dict(net, dict, {.strict = strict});
}

TEST(Fsdp1ModelStateDict, EveryTypeContainsTheWeights) {
  for (const int size : {1, 2, 3, 4}) {
    on_ranks(size, [](const WorldPtr& world) {
      const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {"dp"});
      for (const bool original : {false, true}) {
        const Fsdp1Net plain;
        Fsdp1Net net;
        wrap(net, world->group(), Wrapping::kEach, original);
        const auto full = saved(net, StateDictType::kFull), chunks = saved(net, StateDictType::kSharded);
        const auto dtensors = saved(net, StateDictType::kSharded, mesh);
        EXPECT_EQ(state_difference(full, plain_weights(plain)), "");
        EXPECT_EQ(state_difference(whole_values(chunks), plain_weights(plain)), "");
        EXPECT_EQ(state_difference(whole_values(dtensors), plain_weights(plain)), "");
        EXPECT_EQ(chunks.at("first.weight").is_sharded(), world->size() > 1);
        EXPECT_EQ(is_dtensor(dtensors.at("middle.weight").tensor()), world->size() > 1);
        EXPECT_FALSE(chunks.at("mean").is_sharded());
      }
    });
  }
}

TEST(Fsdp1ModelStateDict, LoadsFromEveryTypeIntoAnotherWrapping) {
  for (const int size : {1, 2, 4}) {
    on_ranks(size, [](const WorldPtr& world) {
      const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {"dp"});
      for (const bool original : {false, true}) {
        const Fsdp1Net plain(3);
        Fsdp1Net from(3);
        wrap(from, world->group(), Wrapping::kEach, original);
        for (const auto& dict : {saved(from, StateDictType::kFull), saved(from, StateDictType::kSharded),
                                 saved(from, StateDictType::kSharded, mesh)}) {
          Fsdp1Net to(8);
          wrap(to, world->group(), Wrapping::kMiddle, !original);
          load(to, dict);
          EXPECT_EQ(state_difference(saved(to, StateDictType::kFull), plain_weights(plain)), "");
          const c10::NoGradGuard no_grad;
          EXPECT_FLOAT_EQ(to(at::zeros({1, 3}) + 0.5).item<float>(), from(at::zeros({1, 3}) + 0.5).item<float>());
        }
      }
    });
  }
}

TEST(Fsdp1ModelStateDict, LocalTypeIsTheFlatShardWithoutPadding) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Fsdp1Net from(3), to(8);
      wrap(from, world->group(), Wrapping::kEach, original);
      wrap(to, world->group(), Wrapping::kEach, original);
      const auto dict = saved(from, StateDictType::kLocal);
      const auto& last = *dict.at("last._flat_param").sharded();  // 7 + 1 elements; with padding 7 + 1 + 1 + 7
      EXPECT_EQ(last.size.size(), 1U);
      EXPECT_EQ(last.shards_metadata.at(1).shard_offsets.at(0), (last.size[0] + 1) / 2);
      EXPECT_EQ(dict.size(), 5U);
      load(to, dict, StateDictType::kLocal);
      EXPECT_EQ(state_difference(saved(to, StateDictType::kFull), plain_weights(Fsdp1Net(3))), "");
    }
  });
}

TEST(Fsdp1ModelStateDict, Rank0OnlyIsEmptyOnOtherRanksAndLoadsOnAllRanks) {
  on_ranks(3, [](const WorldPtr& world) {
    const StateDictSettings rank0{.state_dict_config = FullStateDictConfig{.offload_to_cpu = true, .rank0_only = true}};
    Fsdp1Net from(3), to(8);
    wrap(from, world->group(), Wrapping::kEach, true);
    wrap(to, world->group(), Wrapping::kRoot, false);
    const StateDictTypeScope saving(from, rank0), loading(to, rank0);
    const auto dict = fsdp1_state_dict(from);
    EXPECT_EQ(dict.empty(), world->rank() != 0);
    load_fsdp1_state_dict(to, dict);
    EXPECT_EQ(state_difference(saved(to, StateDictType::kFull), plain_weights(Fsdp1Net(3))), "");
  });
}

TEST(Fsdp1ModelStateDict, IsUnshardedWithNoShard) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool original : {false, true}) {
      Fsdp1Net net(3), to(8);
      wrap(net, world->group(), Wrapping::kEach, original, ShardingStrategy::kNoShard);
      wrap(to, world->group(), Wrapping::kRoot, original, ShardingStrategy::kNoShard);
      for (const auto type : {StateDictType::kFull, StateDictType::kSharded, StateDictType::kLocal}) {
        const auto dict = saved(net, type);
        EXPECT_EQ(state_difference(dict, plain_weights(Fsdp1Net(3))), "");
        load(to, dict, type);
        EXPECT_EQ(state_difference(saved(to, type), plain_weights(Fsdp1Net(3))), "");
      }
    }
  });
}

TEST(Fsdp1ModelStateDict, IncludesParametersOutsideUnits) {
  on_ranks(2, [](const WorldPtr& world) {
    Fsdp1Net from(3), to(8);
    for (auto* net : {&from, &to}) wrap_fsdp1(*net->first, {.group = world->group()});
    for (const auto type : {StateDictType::kFull, StateDictType::kSharded}) {
      const auto dict = saved(from, type);
      EXPECT_EQ(state_difference(whole_values(dict), plain_weights(Fsdp1Net(3))), "");
      load(to, dict, type);
      EXPECT_EQ(state_difference(saved(to, StateDictType::kFull), plain_weights(Fsdp1Net(3))), "");
    }
  });
}

TEST(Fsdp1ModelStateDict, ReportsMissingAndMismatchedKeysOnAllRanks) {
  on_ranks(2, [](const WorldPtr& world) {
    Fsdp1Net net;
    wrap(net, world->group(), Wrapping::kEach, false);
    const auto full = saved(net, StateDictType::kFull);
    const auto failing = [&](const std::function<void(StateDict&)>& change) {
      auto dict = full;
      if (world->rank() == 1) change(dict);
      return message_of([&] { load(net, dict); });
    };
    EXPECT_THAT(failing([](StateDict& dict) { dict.erase("last.bias"), dict.set("extra", 1); }),
                HasSubstr("Missing key(s) in state_dict: 'last.bias'. Unexpected key(s) in state_dict: 'extra'."));
    EXPECT_THAT(failing([](StateDict& dict) { dict.set("last.bias", at::zeros({2})); }),
                HasSubstr("size mismatch for 'last.bias': copying a param with shape [2] from checkpoint, the shape in "
                          "current model is [1]"));
    EXPECT_THAT(failing([](StateDict& dict) { dict.set("last.bias", "text"); }), HasSubstr("found str"));
    EXPECT_THAT(failing([](StateDict& dict) { dict.erase("again"); }), HasSubstr("the ranks differ"));
    EXPECT_THAT(failing([](StateDict& dict) { dict.set("again", at::zeros({7})); }),
                HasSubstr("scale, again are one parameter"));

    auto partial = full;
    partial.erase("last.bias");
    partial.erase("again");  // one of a parameter's names is enough
    partial.set("extra", at::zeros({1}));
    const auto keys = load(net, partial, StateDictType::kFull, /*strict=*/false);
    EXPECT_THAT(keys.missing_keys, ::testing::ElementsAre("last.bias"));
    EXPECT_THAT(keys.unexpected_keys, ::testing::ElementsAre("extra"));
  });
}

TEST(Fsdp1ModelStateDict, AcceptsKeysWithWrapperPrefixes) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool rank0_only : {false, true}) {
      Fsdp1Net net(8);
      wrap(net, world->group(), Wrapping::kEach, false);
      StateDict wrapped;
      for (const auto& [key, value] : plain_weights(Fsdp1Net(3))) wrapped.set("_orig_mod." + to_string(key), value);
      wrapped.set("_fsdp_wrapped_module.last._checkpoint_wrapped_module.bias", wrapped.at("_orig_mod.last.bias"));
      const StateDictTypeScope scope(net, {.state_dict_config = FullStateDictConfig{.rank0_only = rank0_only}});
      EXPECT_THAT(message_of([&] { load_fsdp1_state_dict(net, wrapped); }),
                  HasSubstr("two values are for 'last.bias'"));
      wrapped.erase("_orig_mod.last.bias");
      load_fsdp1_state_dict(net, wrapped);
      EXPECT_EQ(state_difference(saved(net, StateDictType::kFull), plain_weights(Fsdp1Net(3))), "");
    }
  });
}

TEST(Fsdp1ModelStateDict, RequiresBitwiseEqualValuesForNamesOfOneParameter) {
  on_ranks(2, [](const WorldPtr& world) {
    for (const bool rank0_only : {false, true}) {
      Fsdp1Net net(3);
      wrap(net, world->group(), Wrapping::kEach, false);
      const auto before = saved(net, StateDictType::kFull);
      auto other = plain_weights(Fsdp1Net(8));
      const StateDictTypeScope scope(net, {.state_dict_config = FullStateDictConfig{.rank0_only = rank0_only}});
      other.set("again", at::zeros({7}));
      EXPECT_THAT(message_of([&] { load_fsdp1_state_dict(net, other); }), HasSubstr("scale, again are one parameter"));
      EXPECT_EQ(state_difference(saved(net, StateDictType::kFull), before), "");
      for (const char* name : {"scale", "again"}) other.set(name, at::full({7}, std::nan("")));
      EXPECT_EQ(message_of([&] { load_fsdp1_state_dict(net, other); }), "");
      EXPECT_TRUE(saved(net, StateDictType::kFull).at("scale").tensor().isnan().all().item<bool>());
    }
  });
}

TEST(Fsdp1ModelStateDict, ADifferentTypeOnOneRankIsAnErrorOnAllRanks) {
  on_ranks(2, [](const WorldPtr& world) {
    Fsdp1Net net;
    wrap(net, world->group(), Wrapping::kEach, false);
    const auto full = saved(net, StateDictType::kFull);
    if (world->rank() == 1) set_state_dict_type(*net.middle, {.type = StateDictType::kLocal});
    const auto differ = HasSubstr("All FSDP modules should have the same state_dict_type");
    EXPECT_THAT(message_of([&] { fsdp1_state_dict(net); }), differ);
    EXPECT_THAT(message_of([&] { load_fsdp1_state_dict(net, full); }), differ);
  });
}

}  // namespace
}  // namespace tessera::testing
