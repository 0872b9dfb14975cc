#include <gmock/gmock.h>

#include <limits>
#include <random>

#include "tessera/optim/grad_norm.h"
#include "tessera/optim/optimizer.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A leaf whose gradient is `gradient` (on one rank or as a DTensor).
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

// Gradients of random shapes and placements on meshes of three shapes: every rank draws the same.
TEST(GradNorm, EqualsTheNormOnOneRankForRandomPlacements) {
  on_threads(4, [](const WorldPtr& world) {
    const std::vector<MeshPtr> meshes = {init_device_mesh(world, "cpu", {4}, {"x"}),
                                         init_device_mesh(world, "cpu", {2, 2}, {"a", "b"}),
                                         init_device_mesh(world, "cpu", {1, 4}, {"c", "d"})};
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
      parameters.push_back(at::ones({3}).set_requires_grad(true));  // without a gradient
      for (const double p : types) {
        const double norm = optim::get_grad_norm(parameters, p), expected = reference_norm(plain, p);
        EXPECT_NEAR(norm, expected, 1e-6 * expected) << "round " << round << " p " << p;
        EXPECT_EQ(norm, optim::get_grad_norm(parameters, p));
      }
    }
  });
}

TEST(GradNorm, AddsPendingSumsFirst) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line(world);
    const auto local = at::full({3}, world->rank() == 0 ? 5.0f : -1.0f);
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
      EXPECT_TRUE(to_local(parameters[i].grad()).equal(clipped[i]));  // below the limit: untouched
    }
    for (const auto& parameter : parameters) {
      EXPECT_LT(reference_norm({whole(parameter.grad())}, 2), 0.5);
      EXPECT_GT(reference_norm({whole(parameter.grad())}, 2), 0.05);
    }
  });
}

TEST(GradNorm, CarriesNonFiniteGradientsAndClipsNothingThen) {
  for (const double bad : {kInfinity, std::nan("")}) {
    const auto parameter = with_gradient(at::tensor({1.0, bad, 2.0}));
    for (const double p : {2.0, kInfinity}) EXPECT_FALSE(std::isfinite(optim::get_grad_norm({parameter}, p)));
    EXPECT_FALSE(std::isfinite(optim::clip_grad_norm({parameter}, 0.1)));
    EXPECT_EQ(parameter.grad()[2].item<double>(), 2.0);
  }
  EXPECT_EQ(optim::get_grad_norm({}), 0);
  EXPECT_THAT(error_of([] { optim::get_grad_norm({}, 0); }), ::testing::HasSubstr("norm type: found 0"));
}

TEST(Optimizer, ShowsItsStateAsDTensorsOfTheParametersPlacement) {
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
    EXPECT_TRUE(whole(optimizer->state("embedding").at("exp_avg")).equal(at::full({11, 6}, 3.0f)));
  });
}

}  // namespace
}  // namespace tessera::testing
