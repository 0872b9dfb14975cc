// Tests the state dict of one optimizer: its form against torch.optim's, training that continues from a loaded dict,
// edited dicts, and errors that change nothing.
#include "tessera/state/optimizer_dict.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using optim::make_adamw;
using optim::make_sgd;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

StateDict& group(StateDict& dict, size_t index) { return dict.at("param_groups").list()[index].dict(); }
StateDict& state(StateDict& dict, int64_t id) { return dict.at("state").dict().at(id).dict(); }

TEST(OptimizerDict, HasTheFormatOfTorchOptim) {
  AffineNet net;
  const auto optimizer = make_adamw(net, {.lr = 0.1, .weight_decay = 0.2});
  train(net, *optimizer, 2);
  auto dict = optimizer_state_dict(*optimizer);
  EXPECT_THAT(keys_of(dict), ElementsAre("state", "param_groups"));
  EXPECT_THAT(keys_of(dict.at("state").dict()), ElementsAre("0", "1", "2", "3", "4"));
  EXPECT_THAT(keys_of(state(dict, 0)), ElementsAre("step", "exp_avg", "exp_avg_sq"));
  EXPECT_EQ(state(dict, 0).at("step").tensor().item<float>(), 2);
  ASSERT_EQ(dict.at("param_groups").list().size(), 2u);
  EXPECT_THAT(keys_of(group(dict, 0)),
              ElementsAre("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable",
                          "differentiable", "fused", "decoupled_weight_decay", "params"));
  EXPECT_TRUE(same_values(group(dict, 0).at("betas"), StateTuple{{0.9, 0.999}}));
  EXPECT_EQ(group(dict, 0).at("weight_decay").number(), 0.2);
  EXPECT_EQ(group(dict, 1).at("weight_decay").number(), 0);
  EXPECT_TRUE(same_values(group(dict, 1).at("params"), StateList{3, 4}));
  EXPECT_THAT(optimizer_parameter_names(*optimizer),
              ElementsAre("a.weight", "b.weight", "c.weight", "a.bias", "b.bias"));
}

TEST(OptimizerDict, TrainingContinuesAfterLoading) {
  for (const bool adam : {true, false}) {
    AffineNet straight, resumed;
    const auto make = [&](AffineNet& net, double lr) {
      return adam ? make_adamw(net, {.lr = lr, .beta1 = lr, .eps = 1e-6, .weight_decay = 0.2})
                  : make_sgd(net, {.lr = lr, .momentum = lr, .dampening = 0.3});
    };
    const auto first = make(straight, 0.5), second = make(resumed, 0.25);
    train(straight, *first, 3);
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < 5; ++i) resumed.parameters()[i].copy_(straight.parameters()[i]);
    load_optimizer_state_dict(*second, optimizer_state_dict(*first));
    EXPECT_EQ(second->steps(), 3);
    EXPECT_EQ(second->lr(), 0.5);
    train(straight, *first, 2, 300);
    train(resumed, *second, 2, 300);
    EXPECT_TRUE(same_parameters(straight, resumed)) << adam;
  }
}

TEST(OptimizerDict, ResetsStatesMissingInTheDict) {
  AffineNet net;
  const auto optimizer = make_adamw(net, {.weight_decay = 0});
  train(net, *optimizer, 2);
  auto dict = copy_of(optimizer_state_dict(*optimizer));
  dict.at("state").dict().erase(int64_t{1});
  state(dict, 2) = StateDict{};
  load_optimizer_state_dict(*optimizer, dict);
  for (const auto& name : {"a.bias", "b.weight"}) {
    EXPECT_EQ(optimizer->state(name).at("step").item<float>(), 0);
    EXPECT_TRUE(optimizer->state(name).at("exp_avg").equal(at::zeros_like(optimizer->state(name).at("exp_avg"))));
  }
  EXPECT_EQ(optimizer->state("a.weight").at("step").item<float>(), 2);
}

TEST(OptimizerDict, LoadsMomentumBuffersWithoutStepAsStarted) {
  AffineNet straight, resumed;
  const optim::SgdOptions options{.lr = 0.1, .momentum = 0.9, .dampening = 0.5};
  const auto first = make_sgd(straight, options), second = make_sgd(resumed, options);
  train(straight, *first, 1);
  train(resumed, *second, 1);
  auto dict = copy_of(optimizer_state_dict(*first));
  for (int64_t id = 0; id < 5; ++id) state(dict, id).erase("step");  // torch.optim.SGD has no step
  load_optimizer_state_dict(*second, dict);
  train(straight, *first, 1, 300);
  train(resumed, *second, 1, 300);
  EXPECT_TRUE(same_parameters(straight, resumed));
  for (int64_t id = 0; id < 5; ++id) state(dict, id).set("momentum_buffer", nullptr);
  load_optimizer_state_dict(*second, dict);  // in the next step the update is the gradient
  EXPECT_EQ(second->state("a.weight").at("step").item<float>(), 0);
}

TEST(OptimizerDict, KeepsStatesOfFrozenParametersThatWereTrained) {
  AffineNet trained, resumed;
  const auto first = make_adamw(trained, {});
  train(trained, *first, 2);
  trained.c->weight.set_requires_grad(false);
  resumed.c->own_parameters()[0].parameter.set_requires_grad(false);
  const auto second = make_adamw(resumed, {});
  EXPECT_EQ(optimizer_state_dict(*second).at("state").dict().size(), 4u);
  load_optimizer_state_dict(*second, optimizer_state_dict(*first));
  EXPECT_TRUE(second->state("c.weight").at("exp_avg").equal(first->state("c.weight").at("exp_avg")));
  EXPECT_EQ(optimizer_state_dict(*second).at("state").dict().size(), 5u);
}

void narrow(AffineNet& net) {
  for (auto* layer : {net.a.get(), net.b.get(), net.c.get()}) {
    for (auto& slot : layer->own_parameters()) {
      nn::Module::set_parameter(slot, slot.parameter.detach().to(at::kBFloat16).set_requires_grad(true));
    }
  }
}
void train_narrow(AffineNet& net, optim::Optimizer& optimizer, uint64_t seed) {
  for (const auto& parameter : net.parameters()) {
    parameter.mutable_grad() = drawn(parameter.sizes().vec(), ++seed).to(at::kBFloat16);
  }
  optimizer.step();
}

TEST(OptimizerDict, LoadsItsStateDictAfterEdits) {
  AffineNet net;
  narrow(net);
  const auto adam = make_adamw(net, {.lr = 1e-3});
  train_narrow(net, *adam, 50);
  auto dict = optimizer_state_dict(*adam);
  auto before = copy_of(dict);
  state(dict, 0).erase("master");  // the master is then made from the parameter
  state(dict, 1) = StateDict{};
  const at::Tensor average = state(dict, 2).at("exp_avg").tensor();
  state(dict, 2).set("exp_avg", state(dict, 2).at("exp_avg_sq"));
  state(dict, 2).set("exp_avg_sq", average);
  load_optimizer_state_dict(*adam, dict);
  auto after = copy_of(optimizer_state_dict(*adam));
  state(before, 0).set("master", net.a->weight.detach().to(at::kFloat));
  state(before, 1) = StateDict{{"step", at::zeros({})},
                               {"exp_avg", at::zeros({2, 4})},
                               {"exp_avg_sq", at::zeros({2, 4})},
                               {"master", net.b->weight.detach().to(at::kFloat)}};
  const at::Tensor average_before = state(before, 2).at("exp_avg").tensor();
  state(before, 2).set("exp_avg", state(before, 2).at("exp_avg_sq"));
  state(before, 2).set("exp_avg_sq", average_before);
  for (int64_t id = 0; id < 5; ++id) {
    for (const auto& [key, value] : state(before, id)) {
      EXPECT_TRUE(state(after, id).at(key).tensor().equal(value.tensor())) << id << " " << to_string(key);
    }
  }
  EXPECT_EQ(keys_of(state(after, 1)).size(), 4u);

  const auto sgd = make_sgd(net, {.lr = 1e-3, .momentum = 0.9});
  train_narrow(net, *sgd, 90);
  dict = optimizer_state_dict(*sgd);
  before = copy_of(dict);
  state(dict, 0).erase("momentum_buffer");
  load_optimizer_state_dict(*sgd, dict);
  EXPECT_TRUE(sgd->state("a.weight").at("master").equal(state(before, 0).at("master").tensor()));
  EXPECT_TRUE(sgd->state("a.weight").at("momentum_buffer").equal(at::zeros({4, 3})));
}

TEST(OptimizerDict, LoadsMasterWeightsOrMakesThemFromTheParameters) {
  AffineNet straight, resumed, bare;
  for (auto* net : {&straight, &resumed, &bare}) narrow(*net);
  const auto first = make_adamw(straight, {.lr = 1e-3}), second = make_adamw(resumed, {}), third = make_adamw(bare, {});
  train_narrow(straight, *first, 50);
  auto dict = copy_of(optimizer_state_dict(*first));
  EXPECT_EQ(state(dict, 0).at("master").tensor().scalar_type(), at::kFloat);
  load_optimizer_state_dict(*second, dict);
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < 5; ++i) resumed.parameters()[i].copy_(straight.parameters()[i]);
  train_narrow(straight, *first, 90);
  train_narrow(resumed, *second, 90);
  EXPECT_TRUE(same_parameters(straight, resumed));
  EXPECT_TRUE(first->state("a.weight").at("master").equal(second->state("a.weight").at("master")));

  for (int64_t id = 0; id < 5; ++id) state(dict, id).erase("master");
  load_optimizer_state_dict(*third, dict);
  EXPECT_TRUE(third->state("a.weight").at("master").equal(bare.a->weight.to(at::kFloat)));
}

TEST(OptimizerDict, ChangesNothingIfAnyValueIsInvalid) {
  AffineNet net;
  const auto optimizer = make_adamw(net, {.lr = 0.1, .weight_decay = 0});
  train(net, *optimizer, 1);
  const auto good = copy_of(optimizer_state_dict(*optimizer));
  const auto error_with = [&](const std::function<void(StateDict&)>& change) {
    auto dict = copy_of(good);
    state(dict, 0).at("exp_avg").tensor().fill_(77);
    group(dict, 0).set("lr", 5.0);
    change(dict);
    const auto text = thrown_by([&] { load_optimizer_state_dict(*optimizer, dict); });
    EXPECT_TRUE(same_values(optimizer_state_dict(*optimizer), good)) << text;
    return text;
  };
  EXPECT_THAT(error_with([](auto& dict) { dict.at("param_groups").list().push_back(StateDict{}); }),
              HasSubstr("different number of parameter groups: found 2"));
  EXPECT_THAT(error_with([](auto& dict) {
                group(dict, 0).set("params", StateList{0, 1});
              }),
              HasSubstr("doesn't match the size"));
  EXPECT_THAT(error_with([](auto& dict) {
                state(dict, 3).set("exp_avg", at::zeros({2, 2, 2}));
              }),
              HasSubstr("'b.bias': exp_avg has shape [2, 2, 2], wanted [2]"));
  EXPECT_THAT(error_with([](auto& dict) {
                group(dict, 0).set("params", StateList{0, 1, 2, 3, 3});
              }),
              HasSubstr("params of group 0: parameter 3 is there twice"));
  EXPECT_THAT(error_with([](auto& dict) {
                group(dict, 0).set("params", StateList{0, 1, 2, 3, "c.weight"});
              }),
              HasSubstr("params of group 0: found a str, wanted numbers"));
  EXPECT_THAT(error_with([](auto& dict) { dict.at("state").dict().set(int64_t{3}, 1); }),
              HasSubstr("'b.bias': its state is a int, wanted a dict"));
  EXPECT_THAT(error_with([](auto& dict) { state(dict, 3).set("step", "one"); }),
              HasSubstr("'b.bias': step is a str, wanted one number"));
  EXPECT_THAT(error_with([](auto& dict) { state(dict, 3).set("step", at::zeros({2})); }),
              HasSubstr("'b.bias': step is a Tensor, wanted one number"));
  EXPECT_THAT(error_with([](auto& dict) { state(dict, 3).erase("exp_avg_sq"); }),
              HasSubstr("step 1 without exp_avg_sq"));
  EXPECT_THAT(error_with([](auto& dict) { state(dict, 3).erase("step"); }), HasSubstr("without step"));
  EXPECT_THAT(error_with([](auto& dict) { state(dict, 3).set("exp_avg", 3); }), HasSubstr("is a int, wanted a Tensor"));
  EXPECT_THAT(error_with([](auto& dict) { group(dict, 0).set("amsgrad", true); }), HasSubstr("amsgrad"));
  EXPECT_THAT(error_with([](auto& dict) { group(dict, 0).set("betas", StateTuple{{0.9, 1.5}}); }), HasSubstr("betas"));
  EXPECT_THAT(error_with([](auto& dict) { group(dict, 0).set("lr", nullptr); }), HasSubstr("'lr'"));
  EXPECT_THAT(error_with([](auto& dict) { dict.at("state").dict().set("a.weight", StateDict{}); }),
              HasSubstr("set_optimizer_state_dict"));
  EXPECT_THAT(error_with([](auto& dict) {
                group(dict, 0).set("param_names", StateList{"a.bias", "a.weight", "b.weight", "b.bias", "c.weight"});
              }),
              HasSubstr("found 'a.bias' as number 0"));
}

TEST(OptimizerDict, HyperparametersAreLoadedPerGroup) {
  AffineNet net;
  const auto optimizer = make_sgd(net, {.lr = 0.1, .groups = {{.names = {"a.weight"}, .lr_factor = 2}, {.names = {}}}});
  auto dict = optimizer_state_dict(*optimizer);
  ASSERT_EQ(dict.at("param_groups").list().size(), 3u);
  EXPECT_EQ(group(dict, 1).at("params").list().size(), 0u);
  EXPECT_EQ(group(dict, 0).at("lr").number(), 0.2);

  for (size_t i = 0; i < 3; ++i) group(dict, i).set("lr", (i == 0 ? 0.2 : 0.1) * 0.25);  // as after steps of a schedule
  group(dict, 1).erase("lr");
  group(dict, 0).set("initial_lr", 0.2);
  group(dict, 2).set("lr", at::full({}, 0.025, at::kDouble));  // lr as a tensor
  load_optimizer_state_dict(*optimizer, dict);
  EXPECT_EQ(optimizer->lr(), 0.025);
  EXPECT_EQ(optimizer_state_dict(*optimizer).at("param_groups").list()[0].dict().at("initial_lr").number(), 0.2);
  optimizer->set_lr(1);
  dict = optimizer_state_dict(*optimizer);
  EXPECT_EQ(group(dict, 0).at("lr").number(), 2);
  EXPECT_EQ(group(dict, 1).at("lr").number(), 1);
  EXPECT_EQ(group(dict, 2).at("lr").number(), 1);

  group(dict, 0).set("lr", 6);  // no base lr fits both factors
  load_optimizer_state_dict(*optimizer, dict);
  const auto before = net.a->weight.detach().clone(), bias_before = net.a->bias.detach().clone();
  for (const auto& parameter : net.parameters()) parameter.mutable_grad() = at::ones_like(parameter.detach());
  optimizer->step();
  EXPECT_TRUE(net.a->weight.detach().allclose(before - 6));
  EXPECT_TRUE(net.a->bias.detach().allclose(bias_before - 1));
}

TEST(OptimizerDict, LoadingMomentumAddsItsBuffer) {
  AffineNet net;
  const auto optimizer = make_sgd(net, {.lr = 0.1});
  train(net, *optimizer, 2);
  auto dict = copy_of(optimizer_state_dict(*optimizer));
  EXPECT_THAT(keys_of(state(dict, 0)), ElementsAre("step"));
  group(dict, 0).set("momentum", 0.9);
  load_optimizer_state_dict(*optimizer, dict);
  train(net, *optimizer, 1, 500);
  EXPECT_TRUE(optimizer->state("a.weight").at("momentum_buffer").equal(drawn({4, 3}, 501)));
}

}  // namespace
}  // namespace tessera::testing
