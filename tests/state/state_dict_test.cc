// Tests the functions that get and set state dicts of models and optimizers, on one rank.
#include "tessera/state/state_dict.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <iostream>

#include "tessera/base/error.h"
#include "tessera/state/optimizer_dict.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using optim::make_adamw;
using optim::make_sgd;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(ModelStateDict, HoldsParametersAndPersistentBuffers) {
  AffineNet net;
  const auto dict = get_model_state_dict(net);
  EXPECT_THAT(keys_of(dict), ElementsAre("scale", "a.weight", "a.bias", "b.weight", "b.bias", "c.weight"));
  EXPECT_EQ(dict.at("a.weight").tensor().data_ptr(), net.a->weight.data_ptr());
  EXPECT_FALSE(dict.at("a.weight").tensor().requires_grad());
}

TEST(ModelStateDict, RoundTrips) {
  AffineNet from(1), to(2);
  const auto keys = set_model_state_dict(to, copy_of(get_model_state_dict(from)));
  EXPECT_THAT(keys.missing_keys, IsEmpty());
  EXPECT_TRUE(same_parameters(from, to));
  EXPECT_TRUE(from.scale.equal(to.scale));
  EXPECT_TRUE(to.a->weight.requires_grad());
}

TEST(ModelStateDict, AcceptsKeysWithPrefixesOfPythonWrappers) {
  AffineNet from(1), to(2);
  StateDict wrapped;
  for (const auto& [key, value] : get_model_state_dict(from)) {
    auto name = to_string(key);
    if (const auto dot = name.find('.'); dot != std::string::npos) name.insert(dot, "._checkpoint_wrapped_module");
    wrapped.set("_orig_mod._fsdp_wrapped_module." + name, value);
  }
  set_model_state_dict(to, wrapped);
  EXPECT_TRUE(same_parameters(from, to));
}

TEST(ModelStateDict, StrictRequiresTheSameKeys) {
  AffineNet net;
  auto dict = copy_of(get_model_state_dict(net));
  dict.erase("b.bias");
  dict.set("d.weight", at::ones({1}));
  EXPECT_THAT(thrown_by([&] { set_model_state_dict(net, dict); }),
              AllOf(HasSubstr("Missing key(s) in state_dict: 'b.bias'"),
                    HasSubstr("Unexpected key(s) in state_dict: 'd.weight'")));
  dict.at("a.weight").tensor().fill_(3);
  const auto keys = set_model_state_dict(net, dict, {.strict = false});
  EXPECT_THAT(keys.missing_keys, ElementsAre("b.bias"));
  EXPECT_THAT(keys.unexpected_keys, ElementsAre("d.weight"));
  EXPECT_TRUE(net.a->weight.detach().equal(at::full({4, 3}, 3.0)));
}

TEST(ModelStateDict, ChangesNothingIfAnyValueIsInvalid) {
  AffineNet net;
  const auto before = copy_of(get_model_state_dict(net));
  auto dict = copy_of(before);
  dict.at("a.weight").tensor().fill_(3);
  dict.set("b.weight", at::ones({4, 2}));
  EXPECT_THAT(thrown_by([&] { set_model_state_dict(net, dict, {.strict = false}); }),
              HasSubstr("size mismatch for 'b.weight': it has shape [4, 2], wanted [2, 4]"));
  dict.set("b.weight", 4);
  EXPECT_THAT(thrown_by([&] { set_model_state_dict(net, dict); }), HasSubstr("'b.weight' is a int, wanted a Tensor"));
  dict.set("b.weight", at::empty({2, 4}, at::kMeta));
  EXPECT_THAT(thrown_by([&] { set_model_state_dict(net, dict); }), HasSubstr("meta device"));
  EXPECT_TRUE(same_values(get_model_state_dict(net), before));
}

TEST(ModelStateDict, IgnoreFrozenParamsOmitsFrozenParameters) {
  AffineNet net(1), other(2);
  net.c->weight.set_requires_grad(false);
  net.c->own_parameters()[0].parameter.set_requires_grad(false);
  other.c->own_parameters()[0].parameter.set_requires_grad(false);
  const auto dict = get_model_state_dict(net, {.ignore_frozen_params = true});
  EXPECT_FALSE(dict.contains("c.weight"));
  EXPECT_THAT(thrown_by([&] { set_model_state_dict(other, dict); }),
              HasSubstr("Missing key(s) in state_dict: 'c.weight'"));
  EXPECT_THAT(set_model_state_dict(other, dict, {.ignore_frozen_params = true}).missing_keys, IsEmpty());
  EXPECT_TRUE(other.a->weight.equal(net.a->weight));
}

struct TiedNet : nn::Callable<TiedNet> {
  std::shared_ptr<AffineLayer> in, out;
  explicit TiedNet(uint64_t seed = 1) {
    in = register_module("in", std::make_shared<AffineLayer>(3, 3, true, seed));
    out = register_module("out", std::make_shared<AffineLayer>(3, 3, false, seed + 5));
    set_parameter(out->own_parameters()[0], in->own_parameters()[0].parameter);
  }
};

TEST(ModelStateDict, SharedParametersAppearUnderAllNames) {
  TiedNet from(1), to(2);
  auto dict = copy_of(get_model_state_dict(from));
  EXPECT_THAT(keys_of(dict), ElementsAre("in.weight", "in.bias", "out.weight"));
  dict.erase("in.weight");  // one of the two names is enough
  EXPECT_THAT(set_model_state_dict(to, dict).missing_keys, IsEmpty());
  EXPECT_TRUE(to.in->weight.equal(from.in->weight));
  EXPECT_TRUE(to.in->own_parameters()[0].parameter.is_same(to.out->own_parameters()[0].parameter));
  dict.set("in.weight", at::ones({3, 3}));
  EXPECT_THAT(thrown_by([&] { set_model_state_dict(to, dict); }), HasSubstr("are one tensor of the model"));
}

TEST(ModelStateDict, RenamesKeysAndSelectsSubmodules) {
  AffineNet from(1), to(2);
  const StateDictOptions renamed{.fqn_modifier = [](const std::string& name) { return "student." + name; }};
  const auto dict = get_model_state_dict(from, renamed);
  EXPECT_TRUE(dict.contains("student.a.weight"));
  set_model_state_dict(to, dict, renamed);
  EXPECT_TRUE(same_parameters(from, to));
  EXPECT_THAT(keys_of(get_model_state_dict(from, {.submodules = {from.b.get()}})), ElementsAre("b.weight", "b.bias"));
  EXPECT_THAT(keys_of(get_model_state_dict(from, {.keep_submodule_prefixes = false, .submodules = {from.b.get()}})),
              ElementsAre("weight", "bias"));
  EXPECT_THAT(thrown_by([&] { get_model_state_dict(from, {.fqn_modifier = [](const auto&) { return "x"; }}); }),
              HasSubstr("two tensors of the model are named 'x'"));
}

// Parameters on the meta device get memory and values. Buffers that no dict holds stay on the meta device and get no
// undefined values.
TEST(ModelStateDict, LoadsIntoParametersOnTheMetaDevice) {
  AffineNet from(1), to(2);
  for (auto* layer : {to.a.get(), to.b.get(), to.c.get()}) {
    for (auto& slot : layer->own_parameters()) {
      nn::Module::set_parameter(slot, slot.parameter.detach().to(at::kMeta).set_requires_grad(true));
    }
  }
  to.scratch = to.scratch.to(at::kMeta);
  auto dict = copy_of(get_model_state_dict(from));
  dict.erase("a.bias");
  EXPECT_THAT(thrown_by([&] { set_model_state_dict(to, dict, {.strict = false}); }),
              HasSubstr("'a.bias' is on the meta device, and the dict has no value for it"));
  dict = get_model_state_dict(from);
  set_model_state_dict(to, dict, {.full_state_dict = true});
  EXPECT_TRUE(same_parameters(from, to));
  EXPECT_TRUE(to.a->weight.is_cpu() && to.a->weight.requires_grad());
  EXPECT_TRUE(to.scratch.is_meta());
}

TEST(OptimizerStateDict, IsKeyedByNameOrFlattened) {
  AffineNet net;
  const auto optimizer = make_adamw(net, {.lr = 0.1, .weight_decay = 0});
  const auto dict = get_optimizer_state_dict(net, {optimizer.get()});
  EXPECT_THAT(keys_of(dict.at("state").dict()), ElementsAre("a.weight", "a.bias", "b.weight", "b.bias", "c.weight"));
  EXPECT_EQ(dict.at("state").dict().at("a.bias").dict().at("step").tensor().item<float>(), 0);
  const auto flat = get_optimizer_state_dict(net, {optimizer.get()}, {.flatten_optimizer_state_dict = true});
  EXPECT_EQ(flat.size(), 5u * (3 + 11));
  EXPECT_EQ(flat.at("param_groups.c.weight.lr").number(), 0.1);
}

TEST(OptimizerStateDict, TrainingContinuesFromEveryForm) {
  for (const bool adam : {true, false}) {
    AffineNet straight;
    const auto make = [&](AffineNet& net) {
      const std::vector<optim::ParameterGroup> groups = {{.names = {"b.bias", "a.weight"}, .lr_factor = 3},
                                                         {.names = {"c.weight"}, .weight_decay = 0.5}};
      return adam ? make_adamw(net, {.lr = 0.1, .groups = groups})
                  : make_sgd(net, {.lr = 0.1, .momentum = 0.9, .groups = groups});
    };
    const auto first = make(straight);
    train(straight, *first, 2);
    const auto weights = copy_of(get_model_state_dict(straight));
    const auto named = copy_of(get_optimizer_state_dict(straight, {first.get()}));
    const auto flat =
        copy_of(get_optimizer_state_dict(straight, {first.get()}, {.flatten_optimizer_state_dict = true}));
    const auto ids = copy_of(optimizer_state_dict(*first));
    train(straight, *first, 2, 400);
    for (const auto& dict : {named, flat, ids}) {
      for (const bool full : {false, true}) {
        AffineNet resumed(7);
        const auto second = make(resumed);
        train(resumed, *second, 1, 900);
        set_state_dict(resumed, {second.get()}, weights, dict, {.full_state_dict = full});
        train(resumed, *second, 2, 400);
        EXPECT_TRUE(same_parameters(straight, resumed)) << keys_of(dict).front() << adam << full;
      }
    }
  }
}

TEST(OptimizerStateDict, MergesSeveralOptimizersOfSubmodules) {
  AffineNet straight, resumed(5);
  const auto make = [](AffineNet& net) {
    std::vector<std::unique_ptr<optim::Optimizer>> out;
    out.push_back(make_adamw(*net.a, {.lr = 0.1}));
    out.push_back(make_sgd(*net.b, {.lr = 0.2, .momentum = 0.9}));
    return out;
  };
  const auto of = [](const auto& owned) { return std::vector<optim::Optimizer*>{owned[0].get(), owned[1].get()}; };
  const auto first = make(straight), second = make(resumed);
  for (const auto& optimizer : first) train(straight, *optimizer, 1);
  for (const bool flat : {false, true}) {
    const StateDictOptions options{.flatten_optimizer_state_dict = flat};
    const auto dict = get_optimizer_state_dict(straight, of(first), options);
    set_optimizer_state_dict(resumed, of(second), dict, options);
    EXPECT_TRUE(same_values(get_optimizer_state_dict(resumed, of(second), options), dict));
  }
  EXPECT_THAT(thrown_by([&] {
                get_optimizer_state_dict(straight, {first[0].get(), first[0].get()});
              }),
              HasSubstr("two optimizers hold 'a.weight'"));
  EXPECT_THAT(thrown_by([&] { get_optimizer_state_dict(resumed, {first[0].get()}); }),
              HasSubstr("is not a parameter of this model"));
  EXPECT_THAT(thrown_by([&] { get_optimizer_state_dict(resumed, {}); }), HasSubstr("Optimizers are not passed in"));
  EXPECT_THAT(thrown_by([&] { set_optimizer_state_dict(straight, of(first), optimizer_state_dict(*first[0])); }),
              HasSubstr("by id for 2 optimizers"));
  // The first stage of a pipeline takes its entries from the whole dict.
  const auto whole = get_optimizer_state_dict(straight, of(first));
  const auto alone = make_adamw(*resumed.a, {});
  set_optimizer_state_dict(resumed, {alone.get()}, whole);
  EXPECT_EQ(alone->lr(), 0.1);
}

TEST(OptimizerStateDict, SharedParametersAreFoundUnderAnyName) {
  TiedNet from(1), to(2);
  const auto first = make_adamw(from, {.lr = 0.25, .weight_decay = 0}), second = make_adamw(to, {.weight_decay = 0});
  train(from, *first, 1);
  for (const bool flat : {false, true}) {
    const auto dict = get_optimizer_state_dict(from, {first.get()}, {.flatten_optimizer_state_dict = flat});
    StateDict renamed = dict;  // as if the shared parameter's other name were first
    if (flat) {
      renamed = {};
      for (const auto& [key, value] : dict) {
        auto name = to_string(key);
        if (const auto at = name.find(".in.weight."); at != std::string::npos) name.replace(at, 11, ".out.weight.");
        renamed.set(name, value);
      }
    } else {
      auto& state = renamed.at("state").dict();
      state.set("out.weight", state.at("in.weight"));
      state.erase("in.weight");
      renamed.at("param_groups").list()[0].dict().set("params", StateList{"out.weight", "in.bias"});
    }
    second->reset_state("in.weight");
    set_optimizer_state_dict(to, {second.get()}, renamed);
    EXPECT_TRUE(second->state("in.weight").at("exp_avg").equal(first->state("in.weight").at("exp_avg")));
    EXPECT_EQ(second->lr(), 0.25);
  }
}

TEST(OptimizerStateDict, GroupsAreMatchedByTheirParameters) {
  AffineNet net(1), other(2);
  const auto saved = make_adamw(net, {.lr = 0.1,
                                      .groups = {{.names = {"a.weight"}, .lr_factor = 2},
                                                 {.names = {"b.weight", "c.weight"}, .lr_factor = 3},
                                                 {.names = {"a.bias", "b.bias"}}}});
  const auto dict = get_optimizer_state_dict(net, {saved.get()});
  const auto turned = make_adamw(
      other,
      {.groups = {{.names = {"b.bias", "a.bias"}}, {.names = {"c.weight", "b.weight"}}, {.names = {"a.weight"}}}});
  set_optimizer_state_dict(other, {turned.get()}, dict);
  const auto lr_of = [](const optim::Optimizer& optimizer, size_t group) {
    return std::get<double>(optimizer.param_groups()[group].hyperparameters[0].second);
  };
  EXPECT_DOUBLE_EQ(lr_of(*turned, 0), 0.1);
  EXPECT_DOUBLE_EQ(lr_of(*turned, 1), 0.3);
  EXPECT_DOUBLE_EQ(lr_of(*turned, 2), 0.2);
  const auto merged = make_adamw(other, {.groups = {{.names = {"a.weight", "b.weight"}}}});
  EXPECT_THAT(thrown_by([&] { set_optimizer_state_dict(other, {merged.get()}, dict); }),
              HasSubstr("saved in groups with different hyper-parameters"));
  const auto refused = [&](StateValue extra) {
    auto changed = copy_of(dict);
    changed.at("param_groups").list()[2].dict().at("params").list().push_back(std::move(extra));
    return thrown_by([&] { set_optimizer_state_dict(other, {turned.get()}, changed); });
  };
  EXPECT_THAT(refused("a.weight"), HasSubstr("'a.weight' is in two saved groups"));
  EXPECT_THAT(refused(7), HasSubstr("params of saved group 2: found a int among names"));
  const auto split =
      make_adamw(other, {.groups = {{.names = {"b.weight"}}, {.names = {"c.weight"}}, {.names = {"a.weight"}}}});
  set_optimizer_state_dict(other, {split.get()}, dict);  // one saved group for two groups
  EXPECT_DOUBLE_EQ(lr_of(*split, 0), 0.3);
  EXPECT_DOUBLE_EQ(lr_of(*split, 1), 0.3);
}

TEST(OptimizerStateDict, AnEmptyGroupMatchesAnEmptyGroup) {
  AffineNet net;
  const auto with = make_adamw(net, {.lr = 0.1, .weight_decay = 0, .groups = {{.names = {}, .lr_factor = 5}}});
  const auto without = make_adamw(net, {.weight_decay = 0});
  const auto dict = get_optimizer_state_dict(net, {with.get()});
  with->set_lr(7);
  set_optimizer_state_dict(net, {with.get()}, dict);
  EXPECT_EQ(with->lr(), 0.1);
  set_optimizer_state_dict(net, {with.get()},
                           get_optimizer_state_dict(net, {with.get()}, {.flatten_optimizer_state_dict = true}));
  EXPECT_THAT(
      thrown_by([&] { set_optimizer_state_dict(net, {with.get()}, get_optimizer_state_dict(net, {without.get()})); }),
      HasSubstr("exactly one param group with zero parameters"));
}

TEST(OptimizerStateDict, StrictRequiresAStateOfEveryTrainedParameter) {
  AffineNet net;
  net.c->own_parameters()[0].parameter.set_requires_grad(false);
  const auto optimizer = make_adamw(net, {.weight_decay = 0});
  train(net, *optimizer, 1);
  auto dict = copy_of(get_optimizer_state_dict(net, {optimizer.get()}));
  EXPECT_FALSE(dict.at("state").dict().contains("c.weight"));
  set_optimizer_state_dict(net, {optimizer.get()}, dict);  // no state for a frozen parameter
  dict.at("state").dict().erase("b.bias");
  EXPECT_THAT(thrown_by([&] { set_optimizer_state_dict(net, {optimizer.get()}, dict); }),
              HasSubstr("Missing optimizer state for parameter 'b.bias' in checkpoint"));
  set_optimizer_state_dict(net, {optimizer.get()}, dict, {.strict = false});
  EXPECT_EQ(optimizer->state("b.bias").at("step").item<float>(), 0);
  EXPECT_EQ(optimizer->state("a.bias").at("step").item<float>(), 1);
  const auto stateless = make_sgd(net, {.lr = 0.1});
  auto bare = get_optimizer_state_dict(net, {stateless.get()});
  bare.set("state", StateDict());
  set_optimizer_state_dict(net, {stateless.get()}, bare);  // SGD has no state here
}

TEST(StateDictOptions, ContradictionsAreErrors) {
  AffineNet net;
  EXPECT_THAT(thrown_by([&] { get_model_state_dict(net, {.broadcast_from_rank0 = true}); }),
              HasSubstr("full_state_dict must be True when broadcast_from_rank0 is True"));
  EXPECT_THAT(
      thrown_by([&] { set_model_state_dict(net, {}, {.full_state_dict = true, .broadcast_from_rank0 = true}); }),
      HasSubstr("set options.group"));
  EXPECT_THAT(thrown_by([&] { set_model_state_dict(net, {}); }), HasSubstr("model state_dict is empty"));
  EXPECT_THAT(thrown_by([] {
                verify_state_dict({{"a._flat_param", 1}}, {{"state", StateDict{}}});
              }),
              HasSubstr("contains _flat_param"));
  EXPECT_THAT(thrown_by([] { verify_optimizer_state_dict({}); }), HasSubstr("optim state_dict is empty"));
  EXPECT_THAT(thrown_by([] { verify_optimizer_state_dict({{"model.a", 1}}); }), HasSubstr("'model.a' is not a key"));
}

TEST(OptimizerStateDict, EighteenThousandParametersTakeLinearTime) {
  struct Wide : nn::Callable<Wide> {
    std::vector<at::Tensor> weights = std::vector<at::Tensor>(18000);
    Wide() {
      for (size_t i = 0; i < weights.size(); ++i) {
        nn::Module& self = *this;
        self.own_parameters().push_back({.name = "w" + std::to_string(i),
                                         .slot = &weights[i],
                                         .parameter = at::zeros({1}).set_requires_grad(true)});
      }
    }
  } wide;
  const auto optimizer = make_adamw(wide, {});
  auto lap = [last = std::clock()](const char* what) mutable {
    const auto now = std::clock();
    std::cout << what << " " << static_cast<double>(now - last) / CLOCKS_PER_SEC << " s of CPU\n";
    last = now;
  };
  const auto named = get_optimizer_state_dict(wide, {optimizer.get()});
  lap("get by name");
  const auto flat = get_optimizer_state_dict(wide, {optimizer.get()}, {.flatten_optimizer_state_dict = true});
  lap("get flat");
  set_optimizer_state_dict(wide, {optimizer.get()}, named);
  lap("set by name");
  set_optimizer_state_dict(wide, {optimizer.get()}, flat);
  lap("set flat");
  EXPECT_EQ(flat.size(), 18000u * 14);
}

}  // namespace
}  // namespace tessera::testing
