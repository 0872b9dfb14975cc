// Tests Muon and 8-bit AdamW with parameters on several ranks. Every layout must give the numbers of one rank.
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_dict.h"
#include "tests/parallel/styled.h"

namespace tessera::testing {
namespace {

const std::vector<std::vector<int64_t>> kShapes = {{24, 40}, {192, 64}, {64, 64}, {7, 5}, {8}};

at::Tensor drawn(size_t index, int64_t number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * number) + index);
  return at::randn(kShapes[index], generator);
}

struct ShardLayout {
  const char* name;
  std::vector<int64_t> mesh;  // empty for plain tensors
  Placements matrix, vector;
  at::ScalarType dtype = at::kFloat;
};

struct Weights : nn::Callable<Weights> {
  std::vector<at::Tensor> weights;
  MeshPtr mesh;
  Weights(const ShardLayout& layout, const WorldPtr& world) : weights(kShapes.size()) {
    if (!layout.mesh.empty()) {
      mesh = init_device_mesh(
          world, "cpu", layout.mesh,
          layout.mesh.size() == 1 ? std::vector<std::string>{"a"} : std::vector<std::string>{"a", "b"});
    }
    for (size_t i = 0; i < kShapes.size(); ++i) {
      register_parameter(fmt::format("w{}", i), weights[i], distributed(drawn(i, 0).to(layout.dtype), layout));
    }
  }
  at::Tensor distributed(const at::Tensor& whole, const ShardLayout& layout) const {
    return mesh ? distribute_tensor(whole, mesh, whole.dim() == 2 ? layout.matrix : layout.vector, std::nullopt)
                : whole;
  }
  std::vector<at::Tensor> full_weights() {
    std::vector<at::Tensor> out;
    for (const auto& parameter : parameters()) {
      out.push_back(mesh ? full_tensor(parameter.detach()) : parameter.detach().clone());
    }
    return out;
  }
  void take_step(optim::Optimizer& optimizer, const ShardLayout& layout, int64_t number) {
    const auto own = parameters();
    for (size_t i = 0; i < own.size(); ++i) {
      if (i == 1 && number == 2) continue;  // no gradient in this step
      own[i].mutable_grad() = distributed(drawn(i, number).to(layout.dtype), layout);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
};

std::vector<ShardLayout> shard_layouts(at::ScalarType dtype = at::kFloat) {
  return {{"plain", {}, {}, {}, dtype},
          {"rows", {3}, {Shard(0)}, {Shard(0)}, dtype},
          {"columns", {2}, {Shard(1)}, {Replicate()}, dtype},
          {"replicas of rows", {2, 2}, {Replicate(), Shard(0)}, {Replicate(), Shard(0)}, dtype},
          {"rows and columns", {2, 2}, {Shard(0), Shard(1)}, {Shard(0), Replicate()}, dtype}};
}

int ranks_of(const ShardLayout& layout) {
  int ranks = 1;
  for (const int64_t size : layout.mesh) ranks *= static_cast<int>(size);
  return ranks;
}

using Make = std::function<std::unique_ptr<optim::Optimizer>(nn::Module&)>;

// Runs 4 steps. After the third step the optimizer's state goes through a checkpoint's state dict into another
// optimizer.
std::vector<at::Tensor> run(const ShardLayout& layout, const WorldPtr& world, const Make& make, bool through_state) {
  Weights model(layout, world);
  auto optimizer = make(model);
  for (int64_t step = 1; step <= 4; ++step) {
    if (step == 4 && through_state) {
      const auto saved = get_optimizer_state_dict(model, {optimizer.get()}, {.full_state_dict = true});
      optimizer = make(model);
      set_optimizer_state_dict(model, {optimizer.get()}, saved, {.full_state_dict = true});
    }
    model.take_step(*optimizer, layout, step);
  }
  return model.full_weights();
}

void expect_same_everywhere(const Make& make, double tolerance, at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> wanted;
  for (const auto& layout : shard_layouts(dtype)) {
    on_threads(ranks_of(layout), [&](const WorldPtr& world) {
      const auto found = run(layout, world, make, false), resumed = run(layout, world, make, true);
      if (layout.mesh.empty()) wanted = found;
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(found[i].allclose(wanted[i], 0, tolerance)) << layout.name << ", weight " << i;
        EXPECT_TRUE(resumed[i].equal(found[i])) << layout.name << ", weight " << i << " after a resume";
        EXPECT_FALSE(found[i].allclose(drawn(i, 0).to(dtype), 0, 1e-2)) << "nothing moved";
      }
    });
  }
}

TEST(MuonLayouts, MatchOneRank) {
  expect_same_everywhere([](nn::Module& model) { return optim::make_muon(model, {.lr = 0.02}); }, 1e-6);
}

TEST(MuonLayouts, StochasticRoundingAndMasterWeightsMatchOneRank) {
  expect_same_everywhere(
      [](nn::Module& model) {
        return optim::make_muon(model, {.lr = 0.02, .master_weights = false, .stochastic_rounding = true, .seed = 7});
      },
      0, at::kBFloat16);
  expect_same_everywhere([](nn::Module& model) { return optim::make_muon(model, {.lr = 0.02}); }, 0, at::kBFloat16);
}

TEST(AdamW8bitLayouts, MatchOneRank) {
  expect_same_everywhere([](nn::Module& model) { return optim::make_adamw8bit(model, {{.lr = 0.02}}); }, 0);
  expect_same_everywhere([](nn::Module& model) { return optim::make_adamw8bit(model, {{.lr = 0.02}}); }, 0,
                         at::kBFloat16);
}

TEST(AdamW8bitLayouts, StateOfOneRankLoadsIntoEveryLayout) {
  const Make make = [](nn::Module& model) { return optim::make_adamw8bit(model, {{.lr = 0.02}}); };
  const auto all = shard_layouts();
  const auto wanted = [&] {
    std::vector<at::Tensor> out;
    on_threads(1, [&](const WorldPtr& world) { out = run(all[0], world, make, false); });
    return out;
  }();
  StateDict weights, state;
  on_threads(1, [&](const WorldPtr& world) {
    Weights model(all[0], world);
    const auto optimizer = make(model);
    for (int64_t step = 1; step <= 3; ++step) model.take_step(*optimizer, all[0], step);
    weights = get_model_state_dict(model, {.full_state_dict = true});
    state = get_optimizer_state_dict(model, {optimizer.get()}, {.full_state_dict = true});
  });
  for (const auto& layout : all) {
    on_threads(ranks_of(layout), [&](const WorldPtr& world) {
      Weights model(layout, world);
      const auto optimizer = make(model);
      set_model_state_dict(model, weights, {.full_state_dict = true});
      set_optimizer_state_dict(model, {optimizer.get()}, state, {.full_state_dict = true});
      model.take_step(*optimizer, layout, 4);
      const auto found = model.full_weights();
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_TRUE(found[i].equal(wanted[i])) << layout.name << ", weight " << i;
      }
    });
  }
}

// A parameter that was trained and is frozen now still has its moments. An optimizer whose model begins with this
// parameter frozen must load them.
TEST(AdamW8bitLayouts, LoadTheStateOfAFrozenParameter) {
  for (const auto& layout : shard_layouts()) {
    on_threads(ranks_of(layout), [&](const WorldPtr& world) {
      Weights trained(layout, world), resumed(layout, world);
      const auto first = optim::make_adamw8bit(trained, {{.lr = 0.02}});
      trained.take_step(*first, layout, 1);
      for (auto* model : {&trained, &resumed}) model->weights[1].set_requires_grad(false);
      const auto second = optim::make_adamw8bit(resumed, {{.lr = 0.02}});
      EXPECT_EQ(second->state("w1").count("exp_avg_scale"), 0u) << "none before it is loaded";
      for (const bool full : {false, true}) {
        const StateDictOptions options{.full_state_dict = full};
        set_optimizer_state_dict(resumed, {second.get()}, get_optimizer_state_dict(trained, {first.get()}, options),
                                 options);
        const auto wanted = first->state("w1"), found = second->state("w1");
        ASSERT_EQ(found.size(), wanted.size()) << layout.name;
        for (const auto& [name, value] : wanted) {
          EXPECT_TRUE(local_tensor_of(found.at(name)).equal(local_tensor_of(value))) << layout.name << " " << name;
        }
      }
      auto wrong = get_optimizer_state_dict(trained, {first.get()}, {.full_state_dict = true});
      wrong.at("state").dict().at("w1").dict().set("exp_avg_scale", at::zeros({7}));
      const auto third = optim::make_adamw8bit(resumed, {{.lr = 0.02}});
      EXPECT_THAT(error_of([&] { set_optimizer_state_dict(resumed, {third.get()}, wrong, {.full_state_dict = true}); }),
                  ::testing::HasSubstr("exp_avg_scale has shape [7], wanted [48]"));
    });
  }
}

TEST(AdamW8bit, OnlyMomentsOfLargeTensorsAreQuantizedToAQuarterOfTheMemory) {
  on_threads(1, [&](const WorldPtr& world) {
    Weights model(shard_layouts()[0], world);
    const auto optimizer = optim::make_adamw8bit(model, {});
    const auto large = optimizer->state("w1"), small = optimizer->state("w0");
    int64_t bytes = 0;
    for (const auto& [name, value] : large) bytes += name == "step" ? 0 : static_cast<int64_t>(value.nbytes());
    EXPECT_EQ(bytes, 2 * (192 * 64 + 192 * 64 / 256 * 4));
    EXPECT_EQ(small.count("exp_avg"), 1u);
    EXPECT_EQ(large.count("exp_avg"), 0u);
  });
}

}  // namespace
}  // namespace tessera::testing
