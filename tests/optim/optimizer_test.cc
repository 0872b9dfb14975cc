// Tests the optimizers and the learning rate schedules on one rank: groups, state, master weights, stochastic rounding
// and errors.
#include "tessera/optim/optimizer.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <deque>
#include <limits>
#include <memory>
#include <string>

#include "tessera/base/error.h"
#include "tessera/optim/schedule.h"
#include "tests/support/alone_on_device.h"

namespace tessera::optim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::here;

struct Model : nn::Callable<Model> {
  at::Tensor weight, spared, norm;
  Model() {
    register_parameter("weight", weight, here(at::ones({4, 4})));
    register_parameter("spared", spared, here(at::ones({4, 4})), /*decay=*/false);
    register_parameter("norm", norm, here(at::ones({4})));
  }
};

void set_gradients(Model& model, double value) {
  for (const auto& parameter : model.parameters()) parameter.mutable_grad() = at::full_like(parameter.detach(), value);
}

template <class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Optimizer, WeightDecayAppliesOnlyToMatricesWithDecayEnabled) {
  Model model;
  const auto optimizer = make_adamw(model, {.lr = 0.1, .weight_decay = 0.5});
  set_gradients(model, 0);
  optimizer->step();
  EXPECT_TRUE(model.weight.allclose(here(at::full({4, 4}, 0.95))));
  EXPECT_TRUE(model.spared.equal(here(at::ones({4, 4}))));
  EXPECT_TRUE(model.norm.equal(here(at::ones({4}))));
}

TEST(Optimizer, GroupsOverrideDecayAndRate) {
  Model model;
  const auto optimizer = make_sgd(
      model, {.lr = 0.1, .weight_decay = 0.5, .groups = {{.names = {"norm"}, .lr_factor = 2, .weight_decay = 1}}});
  set_gradients(model, 0);
  optimizer->step();
  EXPECT_TRUE(model.weight.allclose(here(at::full({4, 4}, 0.95))));
  EXPECT_TRUE(model.norm.allclose(here(at::full({4}, 0.8))));
  EXPECT_THAT(error_of([&] { make_sgd(model, {.groups = {{.names = {"nrom"}}}}); }), HasSubstr("names 'nrom'"));
  EXPECT_THAT(error_of([&] {
                make_sgd(model, {.groups = {{.names = {"norm", "norm"}}}});
              }),
              HasSubstr("in two parameter groups"));
}

TEST(Optimizer, ContinuesFromItsState) {
  Model straight, resumed;
  const auto whole = make_adamw(straight, {.lr = 0.1});
  for (int step = 0; step < 2; ++step) {
    set_gradients(straight, 0.3 + step);
    whole->step();
  }
  const auto second = make_adamw(resumed, {.lr = 0.1});
  {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < 3; ++i) resumed.parameters()[i].copy_(straight.parameters()[i]);
  }
  for (const auto& name : whole->parameter_names()) {
    auto to = second->state(name);
    for (const auto& [key, value] : whole->state(name)) to.at(key).copy_(value);
  }
  for (auto* model : {&straight, &resumed}) set_gradients(*model, 0.7);
  whole->step();
  second->step();
  EXPECT_TRUE(straight.weight.equal(resumed.weight));
  EXPECT_EQ(second->state("weight").at("step").item<float>(), 3);
}

// The names have 4 KiB and differ at their end only, so that most of the time of a look-up goes into comparisons of
// names.
struct Many : nn::Callable<Many> {
  struct Layer : nn::Callable<Layer> {
    std::deque<at::Tensor> parameters;
    explicit Layer(int count) {
      for (int i = 0; i < count; ++i) {
        register_parameter(std::to_string(10'000 + i), parameters.emplace_back(), here(at::ones({1})));
      }
    }
  };
  std::shared_ptr<Layer> layer;
  explicit Many(int count) { register_module(std::string(4096, 'n'), layer, std::make_shared<Layer>(count)); }
};

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

TEST(Optimizer, StateLookupTimeDoesNotGrowWithParameters) {
  const auto seconds_each = [](int count) {
    Many model(count);
    const auto optimizer = make_sgd(model, {.momentum = 0.9});
    const auto names = optimizer->parameter_names();
    double least = std::numeric_limits<double>::infinity();
    for (int round = 0; round < 3; ++round) {
      const double start = cpu_seconds();
      for (const auto& name : names) optimizer->state(name);
      least = std::min(least, (cpu_seconds() - start) / count);
    }
    return least;
  };
  const double of_few = seconds_each(40);
  EXPECT_LT(seconds_each(4000), 10 * of_few) << "looking through all takes about 100 times as long";
}

TEST(Optimizer, UpdatesParametersThatAreUnfrozenLater) {
  Model model;
  model.parameters()[0].set_requires_grad(false);
  const auto optimizer = make_adamw(model, {.lr = 0.1, .weight_decay = 0});
  EXPECT_EQ(optimizer->state("weight").count("exp_avg"), 0u);
  set_gradients(model, 1);
  optimizer->step();
  EXPECT_TRUE(model.weight.equal(here(at::ones({4, 4}))));
  model.parameters()[0].set_requires_grad(true);
  set_gradients(model, 1);
  optimizer->step();
  EXPECT_TRUE(model.weight.detach().allclose(here(at::full({4, 4}, 0.9))));
}

// A hundred updates, each below the last digit of bfloat16, must move a parameter as far as in float32. Values that are
// written to the parameter between steps must count.
TEST(Optimizer, UpdatesSixteenBitParametersInFloat32ByDefault) {
  const auto make = [](bool adam, Model& model, bool masters) {
    return adam ? make_adamw(model, {.lr = 1e-3, .master_weights = masters})
                : make_sgd(model, {.lr = 1e-3, .momentum = 0.5, .master_weights = masters});
  };
  for (const bool adam : {true, false}) {
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      Model wide, narrow, lossy;
      for (auto* model : {&narrow, &lossy}) {
        for (auto& slot : model->own_parameters()) {
          nn::Module::set_parameter(slot, slot.parameter.detach().to(dtype).set_requires_grad(true));
        }
      }
      const auto reference = make(adam, wide, true), optimizer = make(adam, narrow, true);
      const auto rounding = make(adam, lossy, false);
      EXPECT_EQ(reference->state("weight").count("master"), 0u);
      EXPECT_EQ(optimizer->state("weight").at("master").scalar_type(), at::kFloat);
      EXPECT_EQ(optimizer->state("weight").at(adam ? "exp_avg" : "momentum_buffer").scalar_type(), at::kFloat);
      EXPECT_EQ(rounding->state("weight").at(adam ? "exp_avg" : "momentum_buffer").scalar_type(), dtype);
      for (int step = 0; step < 100; ++step) {
        for (auto* model : {&wide, &narrow, &lossy}) set_gradients(*model, 0.5);
        for (const auto& each : {reference.get(), optimizer.get(), rounding.get()}) each->step();
        if (step == 60) {
          const at::NoGradGuard no_grad;
          for (auto* model : {&wide, &narrow}) model->weight.select(0, 1).fill_(3);
        }
      }
      EXPECT_TRUE(narrow.weight.equal(wide.weight.to(dtype)));
      EXPECT_TRUE(narrow.norm.equal(wide.norm.to(dtype)));
      EXPECT_LT(narrow.norm[0].item<float>(), 0.97);
      if (dtype == at::kBFloat16) {
        EXPECT_TRUE(lossy.norm.equal(here(at::ones({4}, dtype))));
      }
    }
  }
}

TEST(Optimizer, GroupsWithoutAnLrFollowByTheirLrFactors) {
  Model model;
  const auto optimizer = make_sgd(model, {.lr = 0.1, .groups = {{{"norm"}, 2, 0}, {{}, 4, 0}, {{"spared"}, 0, 0}}});
  const auto rates = [&] {
    std::vector<double> out;
    for (const auto& group : optimizer->param_groups()) {
      out.push_back(std::get<double>(group.hyperparameters[0].second));
    }
    return out;
  };
  const Hyperparameters nothing;
  for (const double lr : {0.025, 0.0, 0.5}) {  // as after steps of a schedule
    optimizer->set_hyperparameters({nothing, nothing, nothing, {{"lr", lr}}});
    EXPECT_EQ(optimizer->lr(), lr);
    EXPECT_THAT(rates(), ElementsAre(2 * lr, 4 * lr, 0, lr));
    optimizer->set_hyperparameters({nothing, nothing, nothing, nothing});
    EXPECT_THAT(rates(), ElementsAre(2 * lr, 4 * lr, 0, lr));
  }
  optimizer->set_hyperparameters({nothing, nothing, {{"lr", 0.25}}, nothing});  // its factor was 0 and fits no lr
  EXPECT_THAT(rates(), ElementsAre(1, 2, 0.25, 0.5));
  optimizer->set_lr(1);
  EXPECT_THAT(rates(), ElementsAre(2, 4, 0.5, 1));
}

// A parameter that was frozen when the momentum was set must get the missing state, whatever state it had.
TEST(Optimizer, AddsMissingStateToUnfrozenParameters) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Model model;
    for (auto& slot : model.own_parameters()) {
      nn::Module::set_parameter(slot, slot.parameter.detach().to(dtype).set_requires_grad(true));
    }
    const auto optimizer = make_sgd(model, {.lr = 0.25});
    const auto step = [&] {
      set_gradients(model, 1);
      optimizer->step();
      return model.weight.detach()[0][0].item<double>();
    };
    step();
    const auto weight = model.parameters()[0];
    weight.set_requires_grad(false);
    optimizer->set_hyperparameters({{{"momentum", 0.5}, {"dampening", 0.5}}});
    EXPECT_EQ(step(), 0.75);
    EXPECT_EQ(optimizer->state("weight").count("momentum_buffer"), 0u);
    weight.set_requires_grad(true);
    EXPECT_EQ(step(), 0.5);   // the gradient itself
    EXPECT_EQ(step(), 0.25);  // half of the buffer and half of the gradient

    optimizer->set_hyperparameters({{{"momentum", 0.0}}});
    EXPECT_EQ(optimizer->state("weight").count("momentum_buffer"), 0u);
    optimizer->set_hyperparameters({{{"momentum", 0.5}}});
    EXPECT_TRUE(optimizer->state("weight").at("momentum_buffer").equal(here(at::zeros({4, 4}))));
    EXPECT_EQ(step(), 0);
    EXPECT_EQ(optimizer->state("weight").count("master"), dtype == at::kBFloat16 ? 1u : 0u);
  }
}

TEST(Optimizer, RefusesSettingsOutOfRange) {
  Model model;
  EXPECT_THAT(error_of([&] { make_adamw(model, {.lr = -1}); }), HasSubstr("found lr -1"));
  EXPECT_THAT(error_of([&] { make_adamw(model, {.beta2 = 1}); }), HasSubstr("found betas (0.9, 1)"));
  EXPECT_THAT(error_of([&] { make_sgd(model, {.momentum = -0.1}); }), HasSubstr("found momentum -0.1"));
  EXPECT_THAT(error_of([&] { make_sgd(model, {.nesterov = true}); }), HasSubstr("wanted momentum above 0"));
  const auto optimizer = make_adamw(model, {});
  EXPECT_THAT(error_of([&] { optimizer->state("other"); }), HasSubstr("no parameter is named 'other'"));
  nn::Module::set_parameter(model.own_parameters()[0], here(at::ones({4, 4})).set_requires_grad(true));
  set_gradients(model, 1);
  EXPECT_THAT(error_of([&] { optimizer->step(); }), HasSubstr("weight: the parameter was replaced"));
}

TEST(Schedule, WarmsUpFromTheFirstStepAndEndsAtTheMinimumLr) {
  const Schedule schedule({.name = "linear", .lr = 2, .warmup_steps = 4, .total_steps = 14, .min_lr_ratio = 0.1});
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.5);
  EXPECT_DOUBLE_EQ(schedule.at(3), 2);
  EXPECT_DOUBLE_EQ(schedule.at(4), 2);
  EXPECT_DOUBLE_EQ(schedule.at(9), 2 * (0.1 + 0.9 * 0.5));
  EXPECT_DOUBLE_EQ(schedule.at(14), 0.2);
  EXPECT_DOUBLE_EQ(schedule.at(1000), 0.2);
  EXPECT_DOUBLE_EQ(Schedule({.name = "cosine", .lr = 3, .total_steps = 10}).at(0), 3);
  EXPECT_DOUBLE_EQ(Schedule({.name = "constant", .lr = 3}).at(7), 3);
  EXPECT_DOUBLE_EQ(Schedule({.name = "cosine", .lr = 3, .warmup_steps = 2, .total_steps = 2}).at(2), 3);
  EXPECT_THAT(error_of([] { Schedule({.name = "step"}); }),
              HasSubstr("found 'step', wanted cosine, linear, constant or wsd"));
  EXPECT_THAT(error_of([] { Schedule({.min_lr_ratio = 2}); }), HasSubstr("min_lr_ratio: found 2"));
  EXPECT_THAT(error_of([] { Schedule({.warmup_steps = -1}); }), HasSubstr("found -1 warm-up steps"));
}

struct HalfModel : nn::Callable<HalfModel> {
  at::Tensor weight;
  explicit HalfModel(const at::Tensor& value) { register_parameter("weight", weight, value); }
};

// Each of a thousand updates is a hundredth of the last digit. With rounding to nearest the value does not change; with
// stochastic rounding it moves as far as in exact arithmetic, on average.
TEST(Optimizer, StochasticRoundingKeepsSmallUpdatesOnAverage) {
  const auto start = here(at::ones({64, 64}, at::kBFloat16));
  HalfModel still(start.clone()), moving(start.clone());
  const auto nearest = make_sgd(still, {.lr = 1, .master_weights = false});
  const auto random =
      make_sgd(moving, {.lr = 1, .momentum = 0.5, .master_weights = false, .stochastic_rounding = true, .seed = 3});
  EXPECT_EQ(random->state("weight").at("momentum_buffer").scalar_type(), at::kFloat);
  EXPECT_EQ(random->state("weight").count("master"), 0u);
  for (int step = 0; step < 1000; ++step) {
    still.weight.mutable_grad() = at::full_like(start, -4e-5);
    moving.weight.mutable_grad() = at::full_like(start, -2e-5);  // momentum doubles the update
    nearest->step();
    random->step();
  }
  EXPECT_TRUE(still.weight.equal(start));
  const auto mean = moving.weight.detach().to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(mean, 1.04, 1.5e-3);
  EXPECT_GT(moving.weight.detach().to(at::kDouble).std().item<double>(), 1e-3) << "all went the same way";
}

TEST(Optimizer, StochasticRoundingGivesANeighbourAndKeepsExactValues) {
  HalfModel model(here(at::tensor({1.0, -2.0, 0.0, 3.0e38})).to(at::kBFloat16));
  const auto optimizer = make_sgd(model, {.lr = 1, .master_weights = false, .stochastic_rounding = true});
  model.weight.mutable_grad() = here(at::tensor({0.0, 0.0, 0.0, 0.0})).to(at::kBFloat16);
  const auto before = model.weight.detach().clone();
  optimizer->step();
  EXPECT_TRUE(model.weight.equal(before));
  model.weight.mutable_grad() = here(at::tensor({double(INFINITY), double(NAN), 1.0, 0.0})).to(at::kBFloat16);
  optimizer->step();
  EXPECT_EQ(model.weight[0].item<double>(), -INFINITY);
  EXPECT_TRUE(std::isnan(model.weight[1].item<double>()));
  EXPECT_EQ(model.weight[2].item<double>(), -1);
  const auto exact = here(at::full({4096}, 1 + 1.0 / 512));  // a quarter of the way between two bfloat16 numbers
  HalfModel many(here(at::ones({4096}, at::kBFloat16)));
  const auto rounding = make_sgd(many, {.lr = 1, .master_weights = false, .stochastic_rounding = true, .seed = 9});
  many.weight.mutable_grad() = here(at::full({4096}, -1.0 / 512)).to(at::kBFloat16);
  rounding->step();
  const auto found = many.weight.detach().to(at::kFloat);
  EXPECT_TRUE(found.eq(1).logical_or(found.eq(1 + 1.0 / 128)).all().item<bool>());
  EXPECT_NEAR(found.eq(1).to(at::kFloat).mean().item<double>(), 0.75, 0.03);
  EXPECT_NEAR(found.mean().item<double>(), exact.mean().item<double>(), 3e-4);
}

TEST(Optimizer, StepIsSkippedWhenFoundInfIsSet) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    Model model, plain;
    for (Model* each : {&model, &plain}) {
      for (auto parameter : each->parameters()) parameter.set_data(parameter.detach().to(dtype));
    }
    const auto optimizer = make_adamw(model, {.lr = 0.1}), expected = make_adamw(plain, {.lr = 0.1});
    const double infinity = std::numeric_limits<double>::infinity();
    for (const double value : {1.0, infinity, 0.25, infinity, -2.0}) {
      set_gradients(model, value);
      optimizer->step(here(at::full({}, value == infinity ? 1.0 : 0.0, at::kFloat)));
      if (value == infinity) continue;
      set_gradients(plain, value);
      expected->step();
    }
    for (const auto& name : optimizer->parameter_names()) {
      const auto states = expected->state(name);
      EXPECT_TRUE(optimizer->slot(name).parameter.equal(expected->slot(name).parameter)) << name;
      for (const auto& [key, value] : optimizer->state(name)) EXPECT_TRUE(value.equal(states.at(key))) << name << key;
    }
  }
  Model model;
  set_gradients(model, 1);
  EXPECT_THAT(error_of([&] { make_sgd(model, {.lr = 0.1})->step(here(at::zeros({}))); }), HasSubstr("found_inf"));
}

TEST(Optimizer, StochasticRoundingIsRefusedWithMasterWeightsOrFloat16) {
  HalfModel bfloat(here(at::ones({2}, at::kBFloat16))), half(here(at::ones({2}, at::kHalf)));
  EXPECT_THAT(error_of([&] { make_sgd(bfloat, {.stochastic_rounding = true}); }),
              HasSubstr("found stochastic_rounding with master_weights"));
  EXPECT_THAT(error_of([&] { make_adamw(half, {.master_weights = false, .stochastic_rounding = true}); }),
              HasSubstr("stochastic_rounding for float16"));
}

TEST(Schedule, WsdRequiresStepsForWarmUpAndDecay) {
  ScheduleOptions options{.name = "wsd", .lr = 1, .warmup_steps = 6, .total_steps = 10};
  options.decay_steps = 5;
  EXPECT_THAT(error_of([&] { Schedule schedule(options); }), HasSubstr("found 6 steps of warm-up and 5 of decay"));
  options.decay_steps = 4;
  const Schedule tight(options);
  EXPECT_EQ(tight.at(6), 1);  // no step between warm-up and decay
  EXPECT_LT(tight.at(7), 1);
  options.decay_type = "sqrt";
  EXPECT_THAT(error_of([&] { Schedule schedule(options); }), HasSubstr("decay_type: found 'sqrt'"));
}

TEST(Optimizer, OneGroupMayHaveMomentum) {
  Model model;
  const auto optimizer =
      make_sgd(model, {.lr = 0.1, .groups = {{.names = {"norm"}, .weight_decay = 0, .settings = {{"momentum", 0.5}}}}});
  for (int step = 0; step < 2; ++step) {
    set_gradients(model, 1);
    optimizer->step();
  }
  EXPECT_TRUE(model.weight.allclose(here(at::full({4, 4}, 0.8))));
  EXPECT_TRUE(model.norm.allclose(here(at::full({4}, 0.75)))) << "1 - 0.1 - 0.1 * 1.5";
}

TEST(Optimizer, GroupsHaveSeparateSettings) {
  Model model;
  const auto optimizer =
      make_muon(model, {.lr = 0.1,
                        .groups = {{.names = {"spared", "norm"},
                                    .lr_factor = 0.5,
                                    .weight_decay = 0.2,
                                    .settings = {{"betas", std::vector<double>{0.5, 0.6}}, {"momentum", 0.7}}}}});
  const auto groups = optimizer->param_groups();
  ASSERT_EQ(groups.size(), 3u) << "the group is two, of Muon and of AdamW, and the rest is one";
  const auto setting = [&](size_t group, const std::string& name) {
    for (const auto& [key, value] : groups[group].hyperparameters) {
      if (key == name) return value;
    }
    return Hyperparameter();
  };
  EXPECT_THAT(groups[0].params, ElementsAre("spared"));
  EXPECT_EQ(std::get<bool>(setting(0, "use_muon")), true);
  EXPECT_EQ(std::get<double>(setting(0, "momentum")), 0.7);
  EXPECT_EQ(std::get<double>(setting(0, "lr")), 0.05);
  EXPECT_THAT(groups[1].params, ElementsAre("norm"));
  EXPECT_EQ(std::get<std::vector<double>>(setting(1, "betas")), (std::vector<double>{0.5, 0.6}));
  EXPECT_EQ(std::get<double>(setting(1, "weight_decay")), 0.2);
  EXPECT_THAT(groups[2].params, ElementsAre("weight"));
  EXPECT_EQ(std::get<double>(setting(2, "momentum")), 0.95);
  EXPECT_THAT(error_of([&] {
                optimizer->set_hyperparameters({{{"use_muon", false}}, {}, {}});
              }),
              HasSubstr("found another use_muon"));
}

}  // namespace
}  // namespace tessera::optim
