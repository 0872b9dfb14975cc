// Tests the norm and the clipping of gradients of plain tensors and DTensors, against the norm on one rank and against
// numbers of upstream. Tests the optimizer's state and rounding on DTensors.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "tessera/base/error.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/optim/optimizer.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Returns a leaf whose gradient is `gradient`, a plain tensor or a DTensor.
at::Tensor with_gradient(const at::Tensor& gradient) {
  at::NoGradGuard no_grad;
  auto parameter = at::zeros_like(gradient).set_requires_grad(true);
  parameter.mutable_grad() = gradient;
  return parameter;
}

double reference_norm(const std::vector<at::Tensor>& gradients, double p) {
  std::vector<at::Tensor> flat;
  for (const auto& gradient : gradients) flat.push_back(gradient.flatten().to(at::kDouble));
  return at::linalg_vector_norm(at::cat(flat), p).item<double>();
}

// The gradients have random shapes and placements on meshes of three shapes. Every rank draws the same values.
TEST(GradNorm, EqualsTheNormOnOneRankForRandomPlacements) {
  on_threads(4, [](const WorldPtr& world) {
    const std::vector<MeshPtr> meshes = {init_device_mesh(world, test_device_type(), {4}, {"x"}),
                                         init_device_mesh(world, test_device_type(), {2, 2}, {"a", "b"}),
                                         init_device_mesh(world, test_device_type(), {1, 4}, {"c", "d"})};
    std::mt19937 random(5);
    const auto draw = [&](int n) { return static_cast<int64_t>(random() % static_cast<unsigned>(n)); };
    const std::vector<double> types = {2, 1, 3, 0.5, kInfinity};
    for (int round = 0; round < 12; ++round) {
      Values values(static_cast<uint64_t>(round));
      std::vector<at::Tensor> plain, parameters;
      for (int64_t i = 0, count = 1 + draw(5); i < count; ++i) {
        auto gradient = values({1 + draw(9), 1 + draw(7)}, i == 0 ? 100 : 1);
        plain.push_back(gradient);
        const auto& mesh = meshes[static_cast<size_t>(draw(3))];
        Placements where;
        for (int64_t dim = 0; dim < mesh->ndim(); ++dim) where.push_back(draw(3) == 0 ? Replicate() : Shard(draw(2)));
        if (draw(5) != 0) gradient = distribute_tensor(gradient, mesh, where, std::nullopt);
        parameters.push_back(with_gradient(gradient));
      }
      parameters.push_back(here(at::ones({3})).set_requires_grad(true));  // a parameter without a gradient
      for (const double p : types) {
        const double norm = optim::get_grad_norm(parameters, p), expected = reference_norm(plain, p);
        EXPECT_NEAR(norm, expected, 1e-6 * expected) << "round " << round << " p " << p;
        EXPECT_EQ(norm, optim::get_grad_norm(parameters, p));
      }
    }
  });
}

TEST(GradNorm, ReducesPartialGradientsFirst) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line(world);
    const auto local = here(at::full({3}, world->rank() == 0 ? 5.0f : -1.0f));
    EXPECT_NEAR(optim::get_grad_norm({with_gradient(from_local(local, mesh, {Partial()}))}), 4 * std::sqrt(3.0), 1e-6);
  });
}

TEST(GradNorm, IsTheSameUnderEveryNumberOfRanks) {
  SmallModel plain;
  loss_sum(plain(tokens_of(0)), tokens_of(0)).backward();
  const double expected = optim::get_grad_norm(plain.parameters());
  for (const int size : {2, 3, 4}) {
    on_threads(size, [&](const WorldPtr& world) {
      SmallModel model;
      shard(model, {.mesh = line(world)});
      set_gradient_divide_factor(model, 1);
      const auto rows = rows_of_rank(tokens_of(0), world->rank(), size);
      loss_sum(model(rows), rows).backward();
      EXPECT_NEAR(optim::get_grad_norm(model.parameters()), expected, 1e-6 * expected);
    });
  }
}

TEST(GradNorm, ClipsEveryDtypeToTheNorm) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line(world);
    Values values(1);
    std::vector<at::Tensor> parameters;
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      parameters.push_back(with_gradient(distribute_tensor(values({5, 3}).to(dtype), mesh, {Shard(0)}, std::nullopt)));
    }
    const double before = optim::clip_grad_norm(parameters, 0.5);
    EXPECT_GT(before, 1);
    EXPECT_NEAR(optim::get_grad_norm(parameters), 0.5, 2e-3);
    std::vector<at::Tensor> clipped;
    for (const auto& parameter : parameters) clipped.push_back(to_local(parameter.grad()).clone());
    EXPECT_NEAR(optim::clip_grad_norm(parameters, 0.6), 0.5, 2e-3);
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(to_local(parameters[i].grad()).equal(clipped[i]));  // below the limit: unchanged
    }
    for (const auto& parameter : parameters) {
      EXPECT_LT(reference_norm({whole(parameter.grad())}, 2), 0.5);
      EXPECT_GT(reference_norm({whole(parameter.grad())}, 2), 0.05);
    }
  });
}

// For a norm that is not finite, each function must behave as in NeMo.
TEST(GradNorm, PropagatesNonFiniteGradientsAndClipsAsUpstream) {
  for (const double bad : {kInfinity, std::nan("")}) {
    const auto made = [bad] { return with_gradient(here(at::tensor({1.0, bad, 2.0}))); };
    for (const double p : {2.0, 3.0, kInfinity}) EXPECT_FALSE(std::isfinite(optim::get_grad_norm({made()}, p)));
    const auto by_total = made(), clipped = made(), refused = made();
    optim::clip_grad_by_total_norm_({by_total}, 0.1, optim::get_grad_norm({by_total}));
    EXPECT_EQ(by_total.grad()[2].item<double>(), std::isnan(bad) ? 2.0 : 0.0);
    EXPECT_TRUE(std::isnan(by_total.grad()[1].item<double>()));
    EXPECT_FALSE(std::isfinite(optim::clip_grad_norm({clipped}, 0.1)));
    EXPECT_EQ(std::isnan(clipped.grad()[2].item<double>()), std::isnan(bad));
    EXPECT_TRUE(std::isnan(clipped.grad()[1].item<double>()));
    EXPECT_THROW(optim::clip_grad_norm({refused}, 0.1, {.error_if_nonfinite = true}), Error);
    EXPECT_EQ(refused.grad()[2].item<double>(), 2.0);
  }
  EXPECT_EQ(optim::get_grad_norm({}), 0);
  EXPECT_EQ(optim::get_grad_norm({with_gradient(here(at::zeros({3})))}), 0);
  EXPECT_THROW(optim::get_grad_norm({}, 0), Error);
  EXPECT_THROW(optim::get_grad_norm({}, -1), Error);
}

// If a sum of powers overflows or underflows float64, the sum is computed again over gradients that are divided by the
// largest.
TEST(GradNorm, DoesNotOverflowOrVanish) {
  const auto large = with_gradient(here(at::tensor({6e31f, 4.0f})));
  EXPECT_NEAR(optim::clip_grad_norm({large}, 0.3) / 6e31, 1, 1e-7);
  EXPECT_NEAR(large.grad()[0].item<double>(), 0.3, 1e-7);
  for (const double scale : {1e200, 1e-200}) {
    const auto parameter = with_gradient(here(at::tensor({3 * scale, 4 * scale}, at::kDouble)));
    EXPECT_NEAR(optim::get_grad_norm({parameter}) / scale, 5, 1e-12);
    EXPECT_NEAR(optim::get_grad_norm({parameter}, 20) / scale, std::pow(std::pow(3, 20) + std::pow(4, 20), 0.05),
                1e-12);
  }
}

TEST(GradNorm, RankWithoutAGradientParticipates) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line(world);
    const auto other = with_gradient(distribute_tensor(here(at::full({2}, 3.0f)), mesh, {Shard(0)}, std::nullopt));
    auto missing = distribute_tensor(here(at::full({2}, 4.0f)), mesh, {Shard(0)}, std::nullopt);
    const auto here = world->rank() == 0 ? with_gradient(missing) : missing.set_requires_grad(true);
    EXPECT_NEAR(optim::get_grad_norm({here, other}), std::sqrt(9 + 9 + 16), 1e-6);
    EXPECT_NEAR(optim::get_grad_norm({here}), 4, 1e-6);
  });
}

// ---- numbers of NeMo and of its tests ----

struct Drawn {
  std::vector<int64_t> shape;
  MeshPtr mesh;
  Placements placements;
  uint64_t seed;
  double scale;
};
at::Tensor drawn(const Drawn& each) {
  const auto whole =
      here(at::randn(each.shape, at::detail::createCPUGenerator(each.seed + 10000), at::TensorOptions(at::kFloat))) *
      each.scale;
  return with_gradient(distribute_tensor(whole, each.mesh, each.placements, std::nullopt));
}
void expect_norms(const std::vector<Drawn>& list, const std::vector<std::pair<double, double>>& wanted) {
  std::vector<at::Tensor> parameters;
  for (const auto& each : list) parameters.push_back(drawn(each));
  for (const auto& [p, norm] : wanted) {
    EXPECT_NEAR(optim::clip_grad_norm(parameters, 1e10, {.norm_type = p}), norm, 1e-6 * norm) << "p " << p;
  }
}

TEST(GradNorm, GivesUpstreamsNumbersForMixedPlacementsAndMeshes) {
  on_threads(4, [](const WorldPtr& world) {
    const auto grid = init_device_mesh(world, test_device_type(), {2, 2}, {"dp", "tp"});
    const auto ep = init_device_mesh(world, test_device_type(), {4}, {"ep"}),
               dp = init_device_mesh(world, test_device_type(), {4}, {"dp"});
    expect_norms({{{8, 256}, grid, {Shard(0), Replicate()}, 800, 1.0},
                  {{256, 8}, grid, {Replicate(), Shard(1)}, 801, 2.0},
                  {{16, 8}, grid, {Shard(0), Shard(1)}, 802, 1.5},
                  {{128, 128}, grid, {Replicate(), Replicate()}, 803, 0.5}},
                 {{2, 121.40694884}, {1, 11580.475332}, {3, 32.390460153}, {kInfinity, 6.1132287979}});
    expect_norms({{{8, 64, 128}, ep, {Shard(0)}, 500, 2.0},
                  {{8, 128, 64}, ep, {Shard(0)}, 501, 1.5},
                  {{16, 256}, dp, {Shard(0)}, 502, 1.0},
                  {{32, 128}, dp, {Shard(0)}, 503, 3.0}},
                 {{2, 672.188705197}, {1, 196125.418046}, {3, 111.389943056}, {kInfinity, 12.2996826172}});
    expect_norms({{{64, 128}, dp, {Replicate()}, 700, 1.5}, {{128, 64}, dp, {Replicate()}, 701, 2.0}},
                 {{2, 223.937919226}, {1, 22701.5173723}, {3, 52.3322671291}, {kInfinity, 7.7198195457}});
    expect_norms({{{5, 3}, dp, {Shard(0)}, 1, 1.0}, {{3}, dp, {Shard(0)}, 2, 1.0}},
                 {{2, 3.449259858}, {1, 12.03499455}, {3, 2.441244102}, {kInfinity, 1.684926867}});
    const auto strided = init_device_mesh(world, test_device_type(), {2, 2}, {"dp", "tp"});
    const auto whole = Values(3)({9, 5});
    const auto parameter =
        with_gradient(distribute_tensor(whole, strided, {StridedShard(0, 2), Shard(0)}, std::nullopt));
    EXPECT_NEAR(optim::get_grad_norm({parameter}), reference_norm({whole}, 2), 1e-6);
  });
}

// The cases are those of run_clip_grad_norm_correctness.py. Nothing is clipped, so the norm is the norm of the whole
// gradients.
TEST(GradNorm, EqualsTheNormOfFullGradientsInUpstreamsFunctionalTestCases) {
  on_threads(4, [](const WorldPtr& world) {
    const int64_t w = world->size();
    const auto row = [&](const std::string& name) { return init_device_mesh(world, test_device_type(), {w}, {name}); };
    const auto grid = [&](int64_t rows, int64_t columns, const std::string& a, const std::string& b) {
      return init_device_mesh(world, test_device_type(), {rows, columns}, {a, b});
    };
    const auto ep = row("ep"), dp = row("dp"), tp = row("tp");
    const auto dp_ep = grid(2, w / 2, "dp", "ep"), dp_tp = grid(w / 2, 2, "dp", "tp"), flat = grid(1, w, "a", "b");
    const Placements s0{Shard(0)}, s1{Shard(1)}, r{Replicate()};
    struct Case {
      std::vector<Drawn> parameters;
      double p = 2;
    };
    std::vector<Case> cases = {
        {{{{2 * w, 64, 128}, ep, s0, 100, 1.5}, {{2 * w, 128, 64}, ep, s0, 101, 2.0}}},
        {{{{2 * w, 32, 64}, ep, s0, 200, 3.0}, {{2 * w, 64, 32}, ep, s0, 201, 1.2}}, kInfinity},
        {},
        {{{{4 * w, 128}, dp, s0, 400, 1.0}, {{8 * w, 64}, dp, s0, 401, 2.5}}},
        {{{{2 * w, 64, 128}, ep, s0, 500, 2.0},
          {{2 * w, 128, 64}, ep, s0, 501, 1.5},
          {{4 * w, 256}, dp, s0, 502, 1.0},
          {{8 * w, 128}, dp, s0, 503, 3.0}}},
        {{{{4, 8, 64}, dp_ep, {Shard(1), Shard(0)}, 600, 2.0},
          {{16, 128}, dp_ep, {Shard(0), Replicate()}, 601, 1.5},
          {{64, 64}, dp_ep, {Replicate(), Replicate()}, 602, 0.8}}},
        {{{{64, 128}, dp, r, 700, 1.5}, {{128, 64}, dp, r, 701, 2.0}}},
        {{{{8, 256}, dp_tp, {Shard(0), Replicate()}, 800, 1.0},
          {{256, 8}, dp_tp, {Replicate(), Shard(1)}, 801, 2.0},
          {{16, 8}, dp_tp, {Shard(0), Shard(1)}, 802, 1.5},
          {{128, 128}, dp_tp, {Replicate(), Replicate()}, 803, 0.5}}},
        {{{{2 * w, 64, 128}, flat, {Replicate(), Shard(0)}, 1000, 2.0},
          {{32, 4 * w}, flat, {Replicate(), Shard(1)}, 1001, 1.5}}},
        {{{{2 * w, 64, 64}, ep, s0, 1100, 1.0},
          {{4 * w, 128}, dp, s0, 1101, 2.0},
          {{64, 4 * w}, tp, s1, 1102, 1.5},
          {{32, 32}, dp, r, 1103, 0.8}}},
        {{{{2 * w, 64, 128}, ep, s0, 1200, 3.0}, {{4 * w, 256}, dp, s0, 1201, 1.0}, {{64, 64}, dp, r, 1202, 2.0}},
         kInfinity},
        {{{{4 * w}, dp, s0, 1300, 1.5}, {{16}, dp, r, 1301, 2.0}}}};
    for (uint64_t i = 0; i < 5; ++i) {
      cases[2].parameters.push_back({{2 * w, 16, 32}, ep, s0, 300 + i, 1 + 0.1 * static_cast<double>(i)});
    }
    for (size_t number = 0; number < cases.size(); ++number) {
      std::vector<at::Tensor> parameters, wholes;
      for (const auto& each : cases[number].parameters) {
        parameters.push_back(drawn(each));
        wholes.push_back(whole(parameters.back().grad()));
      }
      const double p = cases[number].p, wanted = reference_norm(wholes, p);
      EXPECT_NEAR(optim::clip_grad_norm(parameters, 1e10, {.norm_type = p}), wanted, 1e-4 * wanted) << number;
    }
    const auto full = here(at::randn({64, 128}, at::detail::createCPUGenerator(901), at::TensorOptions(at::kFloat)));
    const auto pending = with_gradient(from_local(full / static_cast<double>(w), dp, {Partial()}));
    EXPECT_NEAR(optim::clip_grad_norm({pending}, 1e10), reference_norm({full}, 2), 1e-4 * reference_norm({full}, 2));
  });
}

TEST(GradNorm, Bfloat16NormHasThePrecisionOfUpstreamsTest) {
  const auto magnitudes = at::logspace(-2, 2, 65536, 10, at::TensorOptions(at::kFloat));
  const auto signs = here(at::arange(65536)).remainder(3).eq(0).to(at::kFloat) * 2 - 1;
  const std::map<at::ScalarType, std::vector<double>> wanted = {
      {at::kFloat, {711516.0743158413, 5965.053308688728, 100}},
      {at::kBFloat16, {711515.3513793945, 5965.06201931552, 100}}};
  on_threads(1, [&](const WorldPtr& world) {
    const auto group = world->group();
    for (const auto& [dtype, norms] : wanted) {
      const auto values = (magnitudes * signs).to(dtype);
      const std::vector<at::Tensor> parameters = {with_gradient(values.narrow(0, 0, 30000).clone()),
                                                  with_gradient(values.narrow(0, 30000, 35536).clone())};
      const std::vector<double> orders = {1, 2, kInfinity};
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_NEAR(optim::get_grad_norm(parameters, *group, *group, orders[i], at::kFloat), norms[i], 1e-6 * norms[i]);
      }
    }
  });
}

struct TwoWeights : nn::Callable<TwoWeights> {
  at::Tensor weight, bias;
  TwoWeights() {
    register_parameter("weight", weight, here(at::zeros({10, 10})));
    register_parameter("bias", bias, here(at::zeros({10})));
    for (const auto& each : parameters()) each.mutable_grad() = at::full_like(each.detach(), 10);
  }
};

TEST(GradNorm, NormOfModelPartsGivesUpstreamsNumbers) {
  TwoWeights one;
  EXPECT_NEAR(optim::clip_grad_norm(1.0, {&one}), 104.8808823, 1e-5);
  EXPECT_NEAR(one.weight.grad()[0][0].item<double>(), 0.0953463, 1e-6);
  EXPECT_NEAR(optim::get_grad_norm(one.parameters()), 1.0, 1e-5);
  TwoWeights two, three, frozen;
  for (const auto& each : frozen.parameters()) each.set_requires_grad(false);
  EXPECT_NEAR(optim::clip_grad_norm(1.0, {&two, &three, &frozen}), std::sqrt(220.0) * 10, 1e-4);
  EXPECT_EQ(frozen.weight.grad()[0][0].item<double>(), 10);
  EXPECT_EQ(optim::clip_grad_norm(std::nullopt, {&frozen}), 0);
  EXPECT_THROW(optim::clip_grad_norm(1.0, {&one}, {.pp_enabled = true}), Error);
  two.zero_grad();
  EXPECT_EQ(optim::clip_grad_norm(1.0, {&two}), 0);
}

TEST(GradNorm, SumsOverPipelineStages) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {4}, {"pp"});
    const double own = world->rank() + 1;
    const auto parameter = with_gradient(here(at::full({3}, own, at::kFloat)));
    EXPECT_NEAR(optim::clip_grad_norm({parameter}, 1.0, {.pp_mesh = mesh}), 9.486832980505138, 1e-12);
    EXPECT_NEAR(parameter.grad()[0].item<double>(), 0.1054092422 * own, 1e-7);
    const auto again = with_gradient(here(at::full({3}, own, at::kFloat)));
    EXPECT_EQ(optim::clip_grad_norm({again}, 1e9, {.norm_type = kInfinity, .pp_mesh = mesh}), 4);
    TwoWeights stage;
    const double norm =
        optim::clip_grad_norm(1.0, {&stage}, {.pp_enabled = true, .device_mesh = mesh, .pp_axis_name = "pp"});
    EXPECT_NEAR(norm, 2 * 104.8808823, 1e-4);
  });
}

TEST(GradNorm, SumsOverPipelineStagesWithShardedParameters) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"pp", "tp"});
    const double stage = 1.0 + static_cast<double>(mesh->local_rank(0));
    TwoWeights part;
    const at::NoGradGuard no_grad;
    const auto sharded = [&](double value) {
      return distribute_tensor(here(at::full({10, 10}, value, at::kFloat)), mesh->slice({"tp"}), {Shard(0)},
                               std::nullopt);
    };
    auto weight = sharded(0).set_requires_grad(true);
    weight.mutable_grad() = sharded(stage);
    nn::Module::set_parameter(part.own_parameters()[0], weight);
    part.bias.mutable_grad() = here(at::full({10}, stage, at::kFloat));
    EXPECT_NEAR(optim::clip_grad_norm(1.0, {&part}, {.pp_enabled = true, .device_mesh = mesh, .pp_axis_name = "pp"}),
                std::sqrt(110.0 * (1 + 4)), 1e-10);
    EXPECT_NEAR(to_local(weight.grad())[0][0].item<double>(), stage / std::sqrt(550.0), 1e-7);
  });
}

TEST(GradNorm, EmptyShardContributesNothing) {
  on_threads(2, [](const WorldPtr& world) {
    const auto parameter = with_gradient(
        distribute_tensor(here(at::tensor({3.0f, 4.0f})).view({1, 2}), line(world), {Shard(0)}, std::nullopt));
    EXPECT_EQ(optim::get_grad_norm({parameter}, kInfinity), 4);
    EXPECT_NEAR(optim::clip_grad_norm({parameter}, 1.0), 5, 1e-12);
    if (world->rank() > 0) return;
    EXPECT_TRUE(to_local(parameter.grad()).allclose(here(at::tensor({0.6f, 0.8f})).view({1, 2}), 1e-5));
  });
}

TEST(GradNorm, ClipByTotalNormScalesOnlyAboveTheMaximum) {
  const auto made = [] {
    return std::vector<at::Tensor>{with_gradient(here(at::tensor({3.0, 4.0}))),
                                   with_gradient(here(at::tensor({1.0, 2.0}))),
                                   here(at::ones({2})).set_requires_grad(true)};
  };
  auto parameters = made();
  EXPECT_NEAR(optim::get_grad_norm(parameters), std::sqrt(30.0), 1e-6);
  optim::clip_grad_by_total_norm_(parameters, 1, 5);
  EXPECT_TRUE(parameters[0].grad().allclose(here(at::tensor({0.6, 0.8})), 1e-5));
  parameters = made();
  optim::clip_grad_by_total_norm_(parameters, 10, 5);
  EXPECT_TRUE(parameters[0].grad().equal(here(at::tensor({3.0, 4.0}))));
  EXPECT_EQ(optim::get_grad_norm({with_gradient(here(at::tensor({-3.0, 7.0})))}, kInfinity), 7);
  EXPECT_THROW(optim::clip_grad_by_total_norm_(parameters, 1, 5, at::kBFloat16), Error);
}

// ---- groups ----

TEST(GradNorm, SumsPlainShardsOverBothGroupsAndDTensorsOverTheirMesh) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 1, 2}, {"dp", "cp", "tp"});
    auto& dp_cp = *mesh->group(std::vector<int64_t>{0, 1});
    auto& tp = *mesh->group("tp");
    const auto plain = with_gradient(here(at::full({1}, world->rank() + 1.0, at::kFloat)));
    const auto placed = with_gradient(
        distribute_tensor(here(at::full({6}, 2.0f)), mesh, {Shard(0), Replicate(), Replicate()}, std::nullopt));
    EXPECT_NEAR(optim::get_grad_norm({plain}, dp_cp, tp), std::sqrt(1 + 4 + 9 + 16), 1e-6);
    EXPECT_NEAR(optim::get_grad_norm({plain, placed}, dp_cp, tp), std::sqrt(30 + 24), 1e-6);
    EXPECT_EQ(optim::get_grad_norm({plain, placed}, dp_cp, tp, kInfinity), 4);
    EXPECT_EQ(optim::get_grad_norm({}, dp_cp, tp), 0);
    // The gradient is sharded over dp only; it has no mesh dim for tp.
    const auto on_dp =
        with_gradient(distribute_tensor(here(at::full({6}, 2.0f)), mesh->slice({"dp"}), {Shard(0)}, std::nullopt));
    EXPECT_NEAR(optim::get_grad_norm({on_dp, placed}, dp_cp, tp), std::sqrt(48), 1e-6);
    EXPECT_THAT(error_of([&] { optim::get_grad_norm({on_dp}, dp_cp, tp); }),
                ::testing::HasSubstr("ranks, wanted a dim, or several dims flattened"));
    // The groups are a diagonal of the mesh: ranks 0 and 3, ranks 1 and 2.
    const auto diagonal =
        world->new_group(world->rank() % 3 == 0 ? std::vector<int>{0, 3} : std::vector<int>{1, 2}, "x");
    EXPECT_THAT(error_of([&] { optim::get_grad_norm({placed}, dp_cp, *diagonal); }),
                ::testing::HasSubstr("of 2 ranks, which crosses"));
  });
}

TEST(Optimizer, StateIsDTensorsWithTheParametersPlacements) {
  on_threads(3, [](const WorldPtr& world) {
    SmallModel model;
    shard(model, {.mesh = line(world)});
    const auto optimizer = optim::make_adamw(model, {.lr = 0.1});
    const auto rows = rows_of_rank(tokens_of(0), world->rank(), world->size());
    loss_sum(model(rows), rows).backward();
    const auto gradient = whole(model.parameters()[0].grad()).clone();
    optimizer->step();
    const auto state = optimizer->state("embedding");
    EXPECT_EQ(state.at("exp_avg").sizes(), model.embedding.sizes());
    EXPECT_EQ(placements(state.at("exp_avg")), placements(model.embedding));
    EXPECT_LT(distance({whole(state.at("exp_avg"))}, {gradient * 0.1}), 1e-6);
    EXPECT_EQ(state.at("step").item<float>(), 1);
    to_local(state.at("exp_avg")).fill_(3);
    EXPECT_TRUE(whole(optimizer->state("embedding").at("exp_avg")).equal(here(at::full({11, 6}, 3.0f))));
  });
}

// The random number of an element depends on its global index only, so shards round as the whole tensor does.
TEST(Optimizer, RoundsStochasticallyTheSameOnEveryLayout) {
  struct One : nn::Callable<One> {
    at::Tensor weight;
    explicit One(const at::Tensor& value) { register_parameter("weight", weight, value); }
  };
  const auto start = Values(5)({7, 6}).to(at::kBFloat16), gradient = Values(6)({7, 6}).to(at::kBFloat16);
  const auto train = [&](One& model, const at::Tensor& grad) {
    const auto optimizer =
        optim::make_adamw(model, {.lr = 1e-3, .master_weights = false, .stochastic_rounding = true, .seed = 11});
    for (int step = 0; step < 3; ++step) {
      model.weight.mutable_grad() = grad;
      optimizer->step();
    }
    return whole(model.weight).detach().clone();
  };
  One plain(start.clone());
  const auto expected = train(plain, gradient);
  EXPECT_FALSE(expected.equal(start));
  for (const int size : {1, 2, 3, 4}) {
    on_threads(size, [&](const WorldPtr& world) {
      for (const auto& placement : {Shard(0), Shard(1), Replicate()}) {
        const auto place = [&](const at::Tensor& t) {
          return distribute_tensor(t.clone(), line(world), {placement}, std::nullopt);
        };
        One model(place(start));
        EXPECT_TRUE(train(model, place(gradient)).cpu().equal(expected)) << size << " ranks, " << to_string(placement);
      }
    });
  }
}

}  // namespace
}  // namespace tessera::testing
