// Tests how whole optimizer states become the states of flat parameters, and how optimizer state dicts are rekeyed,
// with units that are made by hand.
#include "tessera/fsdp1/state/flatten_optim_state.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/fsdp1/state/optim_state_dict.h"
#include "tessera/state/sharded_tensor.h"
#include "tests/fsdp1/hand_made.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

// Two layers, a = Linear(3, 5) and b = Linear(5, 1) without bias. Their flat parameter is split inside a weight.
const std::vector<std::pair<std::string, std::vector<int64_t>>> kMembers = {
    {"a.weight", {5, 3}}, {"a.bias", {5}}, {"b.weight", {1, 5}}};

at::Tensor numbers(std::vector<int64_t> shape, double first) {
  return (at::arange(numel_of(shape), at::kFloat) + first).view(shape);
}
at::Tensor step_of(double value) { return at::full({}, value, at::kFloat); }

UnitStates adam_states() {
  return {{0, {{"exp_avg", numbers({5, 3}, 0)}, {"step", step_of(3)}}},
          {1, {{"exp_avg", numbers({5}, 100)}, {"step", step_of(3)}}},
          {2, {{"exp_avg", numbers({1, 5}, 200)}, {"step", step_of(3)}}}};
}

Fsdp1Unit unit_of(int rank, bool use_orig_params) {
  return Fsdp1Unit(HandMadeRank(rank, 2).handle(kMembers, use_orig_params));
}

std::string check_message(const Fsdp1Unit& unit, const UnitStates& states) {
  try {
    check_unit_states(unit, states);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
    return error.what();
  }
  return "";
}

TEST(FlattenOptimState, ReturnsThePaddedShardOfEachRank) {
  const at::Tensor flat = at::cat({numbers({15}, 0), numbers({5}, 100), numbers({5}, 200)});
  const auto first = flatten_optim_state(unit_of(0, false), adam_states());
  EXPECT_TRUE(first.at("exp_avg").tensor().equal(flat.narrow(0, 0, 13)));
  EXPECT_EQ(first.at("step").tensor().item<float>(), 3);
  const auto second = flatten_optim_state(unit_of(1, false), adam_states());
  EXPECT_TRUE(second.at("exp_avg").tensor().equal(at::cat({flat.narrow(0, 13, 12), at::zeros({1})})));
}

TEST(FlattenOptimState, FillsMissingTensorStatesWithZeros) {
  auto states = adam_states();
  for (auto& [member, state] : states) state.erase("step");
  states.erase(1);
  const auto flat = flatten_optim_state(unit_of(1, false), states);
  EXPECT_TRUE(flat.at("exp_avg").tensor().narrow(0, 2, 5).equal(at::zeros({5})));
  EXPECT_TRUE(flat.at("exp_avg").tensor().narrow(0, 7, 5).equal(numbers({5}, 200)));
  EXPECT_TRUE(flatten_optim_state(unit_of(1, false), {}).empty());
}

TEST(FlattenOptimState, KeepsNonTensorValues) {
  auto states = adam_states();
  for (auto& [member, state] : states) state.set("value1", 2.74), state.set("value2", nullptr);
  const auto flat = flatten_optim_state(unit_of(0, false), states);
  EXPECT_EQ(flat.at("value1").number(), 2.74);
  EXPECT_TRUE(flat.at("value2").is_none());
}

TEST(ShardOrigParamState, ReturnsTheRangeOfThisRank) {
  const auto states = adam_states();
  const auto first = unit_of(0, true), second = unit_of(1, true);
  EXPECT_TRUE(shard_orig_param_state(first, 0, states.at(0)).at("exp_avg").tensor().equal(numbers({15}, 0)));
  EXPECT_TRUE(shard_orig_param_state(first, 1, states.at(1)).empty());
  EXPECT_TRUE(shard_orig_param_state(second, 0, states.at(0)).empty());
  const auto bias = shard_orig_param_state(second, 1, states.at(1));
  EXPECT_TRUE(bias.at("exp_avg").tensor().equal(numbers({5}, 100)));
  EXPECT_EQ(bias.at("step").tensor().item<float>(), 3);
}

TEST(ShardOrigParamState, SplitsInsideAParameter) {
  const HandMadeRank rank(1, 3);  // 15 + 1 + 5 + 3 + 5 + 1 elements: 10 per rank
  const Fsdp1Unit unit(rank.handle(kMembers, true));
  EXPECT_TRUE(shard_orig_param_state(unit, 0, adam_states().at(0)).at("exp_avg").tensor().equal(numbers({5}, 10)));
  EXPECT_TRUE(shard_orig_param_state(unit, 1, adam_states().at(1)).at("exp_avg").tensor().equal(numbers({4}, 100)));
}

TEST(ShardOrigParamState, RefusesAStateOfAnotherShape) {
  StateDict state{{"exp_avg", at::zeros({3, 5})}};
  try {
    shard_orig_param_state(unit_of(0, true), 0, state);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("Tensor optimizer state does not have same shape as its parameter: [3, 5] [5, 3]"));
  }
}

TEST(CheckUnitStates, RefusesMismatchesWithAndWithoutUseOrigParams) {
  for (const bool use_orig_params : {false, true}) {
    const auto unit = unit_of(0, use_orig_params);
    EXPECT_EQ(check_message(unit, adam_states()), "");
    const auto changed = [&](const std::function<void(UnitStates&)>& change) {
      auto states = adam_states();
      change(states);
      return check_message(unit, states);
    };
    EXPECT_THAT(changed([](auto& states) { states[1].erase("exp_avg"); }),
                HasSubstr("Differing optimizer state names for the unflattened parameters"));
    EXPECT_THAT(changed([](auto& states) { states[1].set("exp_avg", 1.0); }),
                HasSubstr("Differing optimizer state types for state 'exp_avg'"));
    EXPECT_THAT(changed([](auto& states) { states[1].set("exp_avg", step_of(1)); }),
                HasSubstr("Differing optimizer state types for state 'exp_avg'"));
    EXPECT_THAT(
        changed([](auto& states) { states[1].set("exp_avg", at::zeros({5}, at::kDouble)); }),
        HasSubstr("must have positive-dimension tensor state with the same dtype but got dtypes Double, Float"));
    EXPECT_THAT(changed([](auto& states) {
                  states[2].set("exp_avg", at::zeros({5, 1}));
                }),
                HasSubstr("Tensor optimizer state does not have same shape as its parameter: [5, 1] [1, 5]"));
    EXPECT_NE(changed([](auto& states) { states.erase(2); }), "");
    auto part = std::make_shared<ShardedTensor>();
    part->size = {5, 3};
    part->local_shards.push_back({at::zeros({2, 3}), {{0, 0}, {3, 3}, ""}});
    EXPECT_THAT(changed([&](auto& states) { states[0].set("exp_avg", part); }),
                HasSubstr("found a local shard of shape 2x3 and Float, its metadata say Float of 3x3"));
  }
}

TEST(CheckUnitStates, RequiresEqualScalarStatesInAFlatParameter) {
  const auto unit = unit_of(0, false);
  auto states = adam_states();
  states[1].set("step", step_of(4));
  EXPECT_THAT(check_message(unit, states),
              HasSubstr("must have scalar state with the same value and dtype but got values "
                        "{3, 4} and dtypes {Float} for state 'step'"));
  states = adam_states();
  states.erase(1);
  EXPECT_THAT(check_message(unit, states), HasSubstr("but got values {3, None}"));
  states = adam_states();
  for (auto& [member, state] : states) state.set("note", member == 2 ? "b" : "a");
  EXPECT_THAT(check_message(unit, states), HasSubstr("must have state with the same value but got values {'a', 'b'}"));
}

TEST(CheckUnitStates, AllowsDifferentStepsWithUseOrigParams) {
  auto states = adam_states();
  states[1].set("step", step_of(4));
  EXPECT_EQ(check_message(unit_of(0, true), states), "");
}

TEST(CheckUnitStates, RefusesZeroDimParameters) {
  const HandMadeRank rank(0, 2);
  for (const bool use_orig_params : {false, true}) {
    const Fsdp1Unit unit(rank.handle({{"a", {2}}, {"scale", {}}}, use_orig_params));
    EXPECT_THAT(check_message(unit, {{1, {{"exp_avg", step_of(0)}}}}),
                HasSubstr("Flattening a zero-dimension parameter is not supported"));
  }
}

class FlattenOptimStateDict : public ::testing::TestWithParam<bool> {
 protected:
  FlattenOptimStateDict()
      : rank_(0, 1), units_({rank_.handle(kMembers, GetParam(), {{"c.weight", "b.weight"}})}, names()) {}
  static std::vector<std::string> names() {
    return GetParam() ? std::vector<std::string>{"a.weight", "a.bias", "b.weight", "free"}
                      : std::vector<std::string>{"_flat_param", "free"};
  }
  StateDict saved() const {
    StateDict states;
    for (const auto& [member, state] : adam_states()) states.set(kMembers[member].first, state);
    states.set("free", StateDict{{"exp_avg", numbers({2}, 7)}});
    return {{"state", states},
            {"param_groups",
             StateList{StateDict{{"lr", 0.1}, {"params", StateList{"free", "b.weight", "a.bias", "a.weight"}}}}}};
  }
  StateDict loaded(const StateDict& dict) const {
    return rekey_flattened(flatten_optim_state_dict(units_, dict, {}), units_, {names()}, false);
  }
  HandMadeRank rank_;
  Fsdp1Units units_;
};
INSTANTIATE_TEST_SUITE_P(, FlattenOptimStateDict, ::testing::Bool());

TEST_P(FlattenOptimStateDict, KeysStateAndGroupsByParameterIds) {
  const auto dict = loaded(saved());
  const auto& states = dict.at("state").dict();
  const int64_t last = static_cast<int64_t>(names().size()) - 1;
  EXPECT_EQ(states.size(), names().size());
  EXPECT_TRUE(states.at(last).dict().at("exp_avg").tensor().equal(numbers({2}, 7)));
  const auto& params = dict.at("param_groups").list().at(0).dict().at("params").list();
  ASSERT_EQ(params.size(), names().size());
  for (size_t i = 0; i < params.size(); ++i) EXPECT_EQ(params[i].integer(), static_cast<int64_t>(i));
}

TEST_P(FlattenOptimStateDict, KeepsUserStateAndAcceptsOtherNamesOfSharedParameters) {
  auto dict = saved();
  auto& states = dict.at("state").dict();
  states.set("c.weight", states.at("b.weight"));
  states.erase("b.weight");
  states.set("epoch", 7);
  const auto loaded_states = loaded(dict).at("state").dict();
  EXPECT_EQ(loaded_states.at("epoch").integer(), 7);
  EXPECT_FALSE(loaded_states.contains("c.weight"));
  EXPECT_EQ(loaded_states.size(), names().size() + 1);
}

TEST_P(FlattenOptimStateDict, WorksWithoutGroupsAndWithoutState) {
  auto dict = saved();
  dict.erase("param_groups");
  EXPECT_FALSE(loaded(dict).contains("param_groups"));
  EXPECT_TRUE(loaded({{"state", StateDict{}}}).at("state").dict().empty());
}

TEST_P(FlattenOptimStateDict, RefusesInvalidStateDicts) {
  const auto message = [&](const StateDict& dict) {
    try {
      loaded(dict);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(message({}),
              HasSubstr("`optim_state_dict` must have the keys \"state\"to be a valid optimizer state dict"));
  EXPECT_THAT(message({{"state", StateDict{{0, StateDict{}}}}}), HasSubstr("found the parameter id 0"));
  EXPECT_THAT(message({{"state", StateDict{{"a.bias", 3}}}}), HasSubstr("found int as the state of a parameter"));
  auto dict = saved();
  dict.at("param_groups").list()[0].dict().at("params").list().emplace_back("d.weight");
  EXPECT_THAT(message(dict), HasSubstr("'d.weight', which is not in the model or not in its optimizer"));
  if (!GetParam()) {
    StateDict empty;
    for (const auto& [name, shape] : kMembers) empty.set(name, StateDict{});
    EXPECT_THAT(message({{"state", empty}}), HasSubstr("is empty. This should happen when use_orig_params=True"));
  }
}

StateDict group_of(double lr, const StateList& params) { return {{"lr", lr}, {"params", params}}; }

TEST(RekeyFlattened, RestoresTheHyperparametersOfEachParamGroup) {
  const HandMadeRank rank(0, 1);
  const Fsdp1Units units({rank.handle(kMembers, true)}, {"a.weight", "a.bias", "b.weight"});
  StateDict states;
  for (const auto& [member, state] : adam_states()) states.set(kMembers[member].first, state);
  const auto loaded = [&](const StateList& groups, const ParameterGroupNames& own, bool by_name = false) {
    const StateDict dict{{"state", states}, {"param_groups", groups}};
    return rekey_flattened(flatten_optim_state_dict(units, dict, {}), units, own, by_name);
  };
  const ParameterGroupNames own = {{"b.weight", "a.weight"}, {"a.bias"}};
  const auto dict = loaded({group_of(0.5, {"a.weight", "a.bias"}), group_of(0.5, {"b.weight"})}, own);
  const auto& groups = dict.at("param_groups").list();
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].dict().at("params").list().at(0).integer(), 0);
  EXPECT_EQ(groups[0].dict().at("params").list().at(1).integer(), 1);
  EXPECT_EQ(groups[1].dict().at("params").list().at(0).integer(), 2);
  EXPECT_EQ(groups[1].dict().at("lr").number(), 0.5);
  EXPECT_TRUE(dict.at("state").dict().at(0).dict().at("exp_avg").tensor().equal(numbers({5}, 200).view({-1})));
  EXPECT_TRUE(dict.at("state").dict().at(2).dict().at("exp_avg").tensor().equal(numbers({5}, 100)));

  const auto swapped = loaded({group_of(0.1, {"a.bias"}), group_of(0.2, {"a.weight", "b.weight"})}, own, true);
  EXPECT_EQ(swapped.at("param_groups").list()[0].dict().at("lr").number(), 0.2);
  EXPECT_EQ(swapped.at("param_groups").list()[0].dict().at("params").list().at(0).string(), "b.weight");
  EXPECT_FALSE(loaded({group_of(0.1, {"a.bias"})}, own).at("param_groups").list()[0].dict().contains("lr"));
  try {
    loaded({group_of(0.1, {"a.bias", "a.weight"}), group_of(0.2, {"b.weight"})}, own);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
    EXPECT_THAT(error.what(), HasSubstr("'b.weight' and 'a.weight' are in one parameter group here, but were saved in "
                                        "groups with different hyper-parameters"));
  }
}

TEST(RekeyFlattened, MergesSavedGroupsWithEqualHyperparameters) {
  const HandMadeRank rank(0, 1);
  const Fsdp1Units units({rank.handle(kMembers, false)}, {"_flat_param"});
  const StateList alike = {group_of(0.5, {"a.bias"}), group_of(0.5, {"b.weight", "a.weight"})};
  const auto rekeyed = [&](const StateList& groups) {
    return rekey_flattened({.entries = {}, .user_state = {}, .param_groups = groups}, units, {{"_flat_param"}}, false)
        .at("param_groups")
        .list();
  };
  const auto groups = rekeyed(alike);
  ASSERT_EQ(groups.size(), 1U);
  EXPECT_EQ(groups[0].dict().at("lr").number(), 0.5);
  EXPECT_EQ(groups[0].dict().at("params").list().size(), 1U);
  EXPECT_THROW(rekeyed({group_of(0.5, {"a.bias"}), group_of(0.1, {"b.weight", "a.weight"})}), Error);
}

struct PlainNet : nn::Module {
  at::Tensor w, b, tied;
  explicit PlainNet(bool tie) {
    const auto weight = register_parameter("w", w, at::ones({2}));
    register_parameter("b", b, at::ones({3}));
    if (tie) register_parameter("tied", tied, weight);
  }
};

TEST(RekeyOptimStateDict, ConvertsBetweenNamesAndIds) {
  PlainNet model(false);
  const std::vector<std::string> names = {"b", "w"};
  const StateDict by_id{{"state", StateDict{{0, StateDict{{"step", 1}}}, {1, StateDict{{"step", 2}}}}},
                        {"param_groups", StateList{StateDict{{"params", StateList{0, 1}}}}}};
  const auto by_name = rekey_optim_state_dict(by_id, OptimStateKeyType::kParamName, model, names);
  EXPECT_EQ(by_name.at("state").dict().at("b").dict().at("step").integer(), 1);
  EXPECT_EQ(by_name.at("state").dict().at("w").dict().at("step").integer(), 2);
  EXPECT_EQ(by_name.at("param_groups").list()[0].dict().at("params").list()[0].string(), "b");
  const auto again = rekey_optim_state_dict(by_name, OptimStateKeyType::kParamId, model, names);
  EXPECT_EQ(again.at("state").dict().at(1).dict().at("step").integer(), 2);
  EXPECT_EQ(again.at("param_groups").list()[0].dict().at("params").list()[1].integer(), 1);
  EXPECT_EQ(rekey_optim_state_dict(by_id, OptimStateKeyType::kParamId, model, names).at("state").dict().size(), 2);
}

TEST(RekeyOptimStateDict, RefusesMixedKeysAndTiedParameters) {
  PlainNet model(false), tied(true);
  const auto message = [](const StateDict& states, nn::Module& of) {
    try {
      rekey_optim_state_dict({{"state", states}}, OptimStateKeyType::kParamName, of,
                             std::vector<std::string>{"w", "b"});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(message({{0, StateDict{}}, {"b", StateDict{}}}, model), HasSubstr("Invalid parameter keys: ['0', 'b']"));
  EXPECT_THAT(message({{0, StateDict{}}}, tied),
              HasSubstr("Each parameter should only map to one parameter name but got 2"));
  EXPECT_THAT(message({{2, StateDict{}}}, model), HasSubstr("found parameter 2, the optimizer has 2"));
}

}  // namespace
}  // namespace tessera::testing
