// Tests optimizers on the pretend device: the CPU's values, without a wait of the host.
#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <functional>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"
#include "tests/devices/pretend.h"

namespace tessera::optim {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Optimizers = testing::OnPretendDevice;

at::Tensor drawn(c10::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kFloat);
}

struct Model : nn::Module {
  std::vector<at::Tensor> matrices, biases;
  Model(size_t layers, at::ScalarType dtype, c10::Device device) : matrices(layers), biases(layers) {
    for (size_t i = 0; i < layers; ++i) {
      const auto wide = static_cast<int64_t>(i) + 5;
      register_parameter(fmt::format("weight{}", i), matrices[i], drawn({wide, 4}, i).to(dtype).to(device));
      register_parameter(fmt::format("bias{}", i), biases[i], drawn({wide}, 9 + i).to(dtype).to(device));
    }
  }
  void set_gradients(uint64_t step) {
    for (const auto& parameter : parameters()) {
      const auto values = drawn(parameter.sizes(), 100 * step + static_cast<uint64_t>(parameter.numel()));
      at::Tensor(parameter).mutable_grad() = values.to(parameter.options().requires_grad(false));
    }
  }
};

using Make = std::function<std::unique_ptr<Optimizer>(nn::Module&)>;
struct Row {
  const char* name;
  at::ScalarType dtype;
  Make make;
};

const std::vector<Row>& rows() {
  static const std::vector<Row> kRows = {
      {"sgd", at::kFloat, [](auto& model) { return make_sgd(model, {.lr = 0.1}); }},
      {"sgd with all but nesterov", at::kFloat,
       [](auto& model) {
         return make_sgd(model, {.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1});
       }},
      {"sgd with nesterov", at::kFloat,
       [](auto& model) {
         return make_sgd(model, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true});
       }},
      {"sgd with masters", at::kBFloat16,
       [](auto& model) { return make_sgd(model, {.lr = 0.1, .momentum = 0.9, .dampening = 0.3}); }},
      {"muon", at::kFloat, [](auto& model) { return make_muon(model, {.lr = 0.1}); }},
      {"muon with masters", at::kBFloat16,
       [](auto& model) { return make_muon(model, {.lr = 0.1, .nesterov = false}); }},
      {"adamw", at::kFloat, [](auto& model) { return make_adamw(model, {.lr = 0.1}); }},
      {"adamw with masters", at::kBFloat16, [](auto& model) { return make_adamw(model, {.lr = 0.1}); }},
      {"adamw with stochastic rounding", at::kBFloat16, [](auto& model) {
         return make_adamw(model, {.lr = 0.1, .master_weights = false, .stochastic_rounding = true, .seed = 3});
       }}};
  return kRows;
}

void expect_equal_parameters(Model& found, Model& wanted, const std::string& where) {
  for (const auto& [name, slot, owner] : found.named_parameters()) {
    const auto own = wanted.named_parameters();
    const auto other = std::ranges::find_if(own, [&, &key = name](const auto& each) { return each.name == key; });
    EXPECT_TRUE(slot->parameter.cpu().equal(other->slot->parameter.cpu())) << where << ", " << name;
  }
}

TEST_F(Optimizers, EqualTheCpuWithoutHostSyncs) {
  for (const auto& [what, dtype, make] : rows()) {
    Model there(3, dtype, testing::pretend_device()), host(3, dtype, c10::kCPU);
    const auto optimizer = make(there), expected = make(host);
    pretend::keep_names(true);
    for (uint64_t step = 0; step < 5; ++step) {
      there.set_gradients(step), host.set_gradients(step);
      pretend::take_sync_names(0);
      const auto before = pretend::counters(0);
      optimizer->step();
      const auto spent = pretend::counters(0) - before;
      if (step >= 2) {
        EXPECT_EQ(spent.host_syncs, 0) << what << ": " << fmt::format("{}", pretend::take_sync_names(0));
      }
      expected->step();
      expect_equal_parameters(there, host, fmt::format("{}, step {}", what, step));
    }
    pretend::keep_names(false);
  }
}

TEST_F(Optimizers, LaunchesDoNotGrowWithTheNumberOfParameters) {
  const auto launches_of = [](const Row& row, size_t layers, bool may_be_left_out) {
    Model model(layers, row.dtype, testing::pretend_device());
    const auto optimizer = row.make(model);
    int64_t launches = 0;
    for (uint64_t step = 0; step < 3; ++step) {
      model.set_gradients(step);
      const auto found_inf = at::zeros({}, at::device(testing::pretend_device()));
      const auto before = pretend::counters(0);
      may_be_left_out ? optimizer->step(found_inf) : optimizer->step();
      launches = (pretend::counters(0) - before).launches;
    }
    return launches;
  };
  const std::vector<std::string> as_lists = {"sgd", "sgd with masters", "adamw", "adamw with masters"};
  for (const auto& row : rows()) {
    if (std::ranges::find(as_lists, row.name) == as_lists.end()) continue;
    EXPECT_EQ(launches_of(row, 6, false), launches_of(row, 1, false)) << row.name;
    if (!std::string_view(row.name).starts_with("adamw")) continue;
    EXPECT_EQ(launches_of(row, 6, true), launches_of(row, 1, true)) << row.name;
  }
}

// After a state is loaded or reset, the host's count of steps must be the state's.
TEST_F(Optimizers, StepCountFollowsALoadedOrResetState) {
  for (const auto& [what, dtype, make] : rows()) {
    Model straight(2, dtype, testing::pretend_device()), resumed(2, dtype, testing::pretend_device());
    const auto whole = make(straight), second = make(resumed);
    const auto step = [](Model& model, Optimizer& optimizer, uint64_t at) {
      model.set_gradients(at);
      optimizer.step();
    };
    for (uint64_t at = 0; at < 3; ++at) step(straight, *whole, at);
    step(resumed, *second, 7);
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < 4; ++i) resumed.parameters()[i].copy_(straight.parameters()[i]);
      for (const auto& name : whole->parameter_names()) {
        const auto to = second->state(name);
        for (const auto& [key, value] : whole->state(name)) to.at(key).copy_(value);
      }
    }
    for (uint64_t at = 3; at < 5; ++at) step(straight, *whole, at), step(resumed, *second, at);
    expect_equal_parameters(resumed, straight, fmt::format("{}, loaded", what));

    Model fresh(2, dtype, testing::pretend_device());
    const auto third = make(fresh);
    {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < 4; ++i) fresh.parameters()[i].copy_(resumed.parameters()[i]);
    }
    for (auto* each : {second.get(), third.get()}) {
      for (const auto& name : each->parameter_names()) each->reset_state(name);
    }
    for (uint64_t at = 0; at < 2; ++at) step(fresh, *third, at), step(resumed, *second, at);
    expect_equal_parameters(resumed, fresh, fmt::format("{}, reset", what));
  }
}

TEST_F(Optimizers, EightBitMomentsOnADeviceAreRefused) {
  struct One : nn::Module {
    at::Tensor weight;
    explicit One(int64_t columns) {
      register_parameter("weight", weight, at::ones({64, columns}).to(testing::pretend_device()));
    }
  };
  One large(64), small(4);
  EXPECT_THAT([&] { make_adamw8bit(large, {}); },
              ThrowsMessage<Error>(HasSubstr("weight: found a parameter on pretend:0, wanted one on the CPU")));
  EXPECT_NO_THROW(make_adamw8bit(small, {})) << "its moments are AdamW's";
  large.set_requires_grad(false);
  EXPECT_NO_THROW(make_adamw8bit(large, {})) << "it has no moments";
}

}  // namespace
}  // namespace tessera::optim
