// Tests AdamW and SGD against PyTorch's, and the schedules against transformers'.
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/process.h"

namespace tessera::optim {
namespace {

using nlohmann::json;

json oracle(const std::string& script, const std::vector<std::string>& arguments) {
  const auto run = testing::run_python("tests/optim/oracle/" + script, arguments);
  if (run.exit_code != 0) throw std::runtime_error(run.err);
  return json::parse(run.out);
}

at::Tensor tensor_of(const json& values, const at::Tensor& like) {
  return at::tensor(values.get<std::vector<double>>(), at::kDouble).to(like.device(), at::kFloat).view(like.sizes());
}

struct Weights : nn::Callable<Weights> {
  at::Tensor first, second, bias;
  explicit Weights(const json& start) {
    register_parameter("first", first, tensor_of(start[0], testing::here(at::empty({3, 4}))));
    register_parameter("second", second, tensor_of(start[1], testing::here(at::empty({3, 4}))));
    register_parameter("bias", bias, tensor_of(start[2], testing::here(at::empty({4}))));
  }
};

void expect_like_pytorch(const json& run, const std::function<std::unique_ptr<Optimizer>(nn::Module&)>& make) {
  Weights model(run["start"]);
  const auto optimizer = make(model);
  const auto parameters = model.parameters();
  for (const auto& gradients : run["gradients"]) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!gradients[i].is_null()) parameters[i].mutable_grad() = tensor_of(gradients[i], parameters[i]);
    }
    optimizer->step();
    optimizer->zero_grad();
    EXPECT_FALSE(parameters[0].grad().defined());
  }
  EXPECT_EQ(optimizer->steps(), 5);
  const auto names = optimizer->parameter_names();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(parameters[i].detach().allclose(tensor_of(run["end"][i], parameters[i]), 1e-6, 1e-7)) << names[i];
    const auto state = optimizer->state(names[i]);
    for (const auto& [key, values] : run["state"][i].items()) {
      EXPECT_TRUE(state.at(key).allclose(tensor_of(values, state.at(key)), 1e-6, 1e-7)) << names[i] << " " << key;
    }
  }
}

TEST(Optimizer, AdamWUpdatesAsPyTorch) {
  for (const double decay : {0.0, 0.3}) {
    const auto run =
        oracle("optimizers.py",
               {"adamw", json{{"lr", 0.1}, {"betas", {0.8, 0.95}}, {"eps", 1e-6}, {"weight_decay", decay}}.dump()});
    expect_like_pytorch(run, [&](nn::Module& model) {
      return make_adamw(model, {.lr = 0.1, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = decay});
    });
  }
}

TEST(Optimizer, SgdUpdatesAsPyTorch) {
  for (const auto& options : {json{{"momentum", 0.0}, {"dampening", 0.0}, {"nesterov", false}},
                              json{{"momentum", 0.9}, {"dampening", 0.2}, {"nesterov", false}},
                              json{{"momentum", 0.9}, {"dampening", 0.0}, {"nesterov", true}}}) {
    auto keywords = options;
    keywords["lr"] = 0.1;
    keywords["weight_decay"] = 0.2;
    const auto run = oracle("optimizers.py", {"sgd", keywords.dump()});
    expect_like_pytorch(run, [&](nn::Module& model) {
      return make_sgd(model, {.lr = 0.1,
                              .momentum = options["momentum"],
                              .dampening = options["dampening"],
                              .weight_decay = 0.2,
                              .nesterov = options["nesterov"]});
    });
  }
}

TEST(Schedule, DecaysAsTransformersAndWarmsUpOneStepAhead) {
  const int64_t warmup = 4, total = 20, count = total + 1;  // transformers' cosine rises again after its end
  for (const double floor : {0.0, 0.1}) {
    const auto rates = oracle(
        "schedules.py", {std::to_string(warmup), std::to_string(total), std::to_string(floor), std::to_string(count)});
    for (const std::string name : {"cosine", "linear", "constant"}) {
      const double ratio = name == "linear" ? 0 : floor;  // transformers has no linear schedule with a floor
      const Schedule schedule(
          {.name = name, .lr = 1, .warmup_steps = warmup, .total_steps = total, .min_lr_ratio = ratio});
      for (int64_t step = 0; step < count; ++step) {
        const double expected = rates[name][static_cast<size_t>(step < warmup ? step + 1 : step)];
        EXPECT_NEAR(schedule.at(step), expected, 1e-12) << name << " step " << step;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::optim
