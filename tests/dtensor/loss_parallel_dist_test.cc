// Tests loss_parallel: the cross entropy of logits that are sharded over classes, against the plain loss on whole
// logits. Values, gradients, placements and the count of collectives are checked.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Reduction.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>

#include "tessera/dtensor/rules/reductions/loss_parallel.h"
#include "tests/dtensor/support.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

struct LossCase {
  std::vector<int64_t> shape;  // shape of the logits; dim 1 (or the only dim) is the classes
  int64_t reduction = at::Reduction::Mean;
  int64_t ignored = -100;
  bool weighted = false;
  bool ignores = false;  // whether some targets are the ignored index
  std::string name() const {
    return fmt::format("[{}] reduction {} ignored {} weighted {} ignores {}", fmt::join(shape, ", "), reduction,
                       ignored, weighted, ignores);
  }
};

struct LossInputs {
  at::Tensor logits, target, weight;

  explicit LossInputs(const LossCase& c, at::ScalarType type = at::kDouble) {
    auto generator = at::detail::createCPUGenerator(17);
    logits = (at::randn(c.shape, generator, at::TensorOptions(at::kDouble)) * 3).to(type);
    auto rows = c.shape;
    const int64_t classes = rows.size() > 1 ? rows[1] : rows[0];
    rows.erase(rows.begin() + (rows.size() > 1 ? 1 : 0));
    target = at::randint(0, classes, rows, generator, at::kLong);
    if (c.ignores && target.numel() > 0) target.view({-1}).slice(0, 0, std::nullopt, 3).fill_(c.ignored);
    if (c.weighted) weight = (at::rand({classes}, generator, at::TensorOptions(at::kDouble)) + 0.2).to(type);
  }
};

std::vector<LossCase> loss_cases() {
  std::vector<LossCase> cases;
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    for (const bool weighted : {false, true}) {
      for (const auto& shape : {std::vector<int64_t>{7, 11}, {8, 5}, {3, 1}, {4, 9, 3}, {2, 6, 2, 3}, {13}}) {
        cases.push_back({.shape = shape, .reduction = reduction, .weighted = weighted});
        if (shape.size() > 1) {
          cases.push_back({.shape = shape, .reduction = reduction, .weighted = weighted, .ignores = true});
        }
      }
      cases.push_back({.shape = {6, 10}, .reduction = reduction, .ignored = 2, .weighted = weighted, .ignores = true});
    }
  }
  return cases;
}

// Returns the loss times a seed that differs from row to row, so that every row's gradient counts.
at::Tensor seeded(const at::Tensor& loss) {
  if (loss.dim() == 0) return loss * 1.5;
  auto seed = at::arange(1, loss.numel() + 1, at::TensorOptions(at::kDouble)).view(loss.sizes()).to(loss.scalar_type());
  if (is_dtensor(loss)) seed = distribute_tensor(seed, device_mesh(loss), placements(loss), std::nullopt);
  return (loss * seed).sum();
}

struct Expected {
  at::Tensor loss, gradient;
  Expected(const LossInputs& inputs, const LossCase& c) {
    auto logits = inputs.logits.clone().set_requires_grad(true);
    loss = at::cross_entropy_loss(logits, inputs.target, inputs.weight, c.reduction, c.ignored);
    seeded(loss).backward();
    gradient = logits.grad();
  }
};

void expect_same(const at::Tensor& ours, const at::Tensor& theirs, const std::string& what) {
  const at::NoGradGuard no_grad;
  const auto whole = is_dtensor(ours) ? full_tensor(ours) : ours;
  EXPECT_TRUE(at::allclose(whole, theirs.detach(), 1e-9, 1e-11, /*equal_nan=*/true)) << what << "\n"
                                                                                     << whole << "\n"
                                                                                     << theirs;
}

// Checks one case over a mesh. The last mesh dim shards the classes; the other mesh dims shard as `others` says.
void check_case(const MeshPtr& mesh, const LossCase& c, const Placements& others) {
  const LossInputs inputs(c);
  const Expected expected(inputs, c);
  Placements lie = others, rows = others;
  lie.push_back(Shard(c.shape.size() > 1 ? 1 : 0));
  rows.push_back(Replicate());
  for (auto& placement : rows) {
    placement = placement.is_shard() && placement.dim > 1 ? Shard(placement.dim - 1) : placement;
  }
  auto logits = distribute_tensor(inputs.logits, mesh, lie, std::nullopt).set_requires_grad(true);
  const bool spread = std::ranges::any_of(others, [](const Placement& p) { return p.is_shard(); });
  const at::Tensor target = spread ? distribute_tensor(inputs.target, mesh, rows, std::nullopt) : inputs.target;
  const LossParallel parallel;
  CommDebugMode count;
  const auto loss = at::cross_entropy_loss(logits, target, inputs.weight, c.reduction, c.ignored);
  const bool none = c.reduction == at::Reduction::None && c.shape.size() > 1;
  if (none) {
    EXPECT_EQ(placements(loss), rows) << c.name();
  } else {
    EXPECT_EQ(placements(loss)[mesh->ndim() - 1], Replicate()) << c.name();
  }
  seeded(loss).backward();
  const int64_t for_means = spread && c.reduction == at::Reduction::Mean ? 1 : 0;  // sum of all weights
  EXPECT_EQ(count.all_reduces(), 3 + for_means) << c.name();
  EXPECT_EQ(count.total(), count.all_reduces()) << c.name();
  EXPECT_EQ(placements(logits.grad()), lie) << c.name();
  expect_same(loss, expected.loss, c.name());
  expect_same(logits.grad(), expected.gradient, c.name());
}

TEST(LossParallel, EqualsThePlainLossOverShardedClassesWithThreeAllReduces) {
  for (const int64_t ranks : {2, 4}) {  // 5 classes over 4 ranks: 2, 2, 1, 0
    on_ranks(static_cast<int>(ranks), {ranks}, [](const MeshPtr& mesh) {
      for (const auto& c : loss_cases()) check_case(mesh, c, {});
    });
  }
}

TEST(LossParallel, EqualsThePlainLossOverShardedRowsAndClasses) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    for (const auto& c : loss_cases()) {
      check_case(mesh, c, {Replicate()});
      if (c.shape.size() > 1) check_case(mesh, c, {Shard(0)});
      if (c.shape.size() == 4) check_case(mesh, c, {Shard(2)});
    }
  });
}

TEST(LossParallel, SupportsWeightsShardedWithTheClasses) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      const LossCase c{.shape = {9, 10}, .reduction = reduction, .weighted = true, .ignores = true};
      const LossInputs inputs(c);
      const Expected expected(inputs, c);
      auto logits = distribute_tensor(inputs.logits, mesh, {Shard(1)}, std::nullopt).set_requires_grad(true);
      const LossParallel parallel;
      CommDebugMode count;
      const auto loss = at::cross_entropy_loss(logits, inputs.target,
                                               distribute_tensor(inputs.weight, mesh, {Shard(0)}, std::nullopt),
                                               reduction, c.ignored);
      EXPECT_EQ(count.total(), 3);
      seeded(loss).backward();
      EXPECT_EQ(count.total(), 4);  // the fourth all-reduce sums the weights of all rows
      expect_same(loss, expected.loss, c.name());
      expect_same(logits.grad(), expected.gradient, c.name());
    }
  });
}

TEST(LossParallel, MeanOverIgnoredTargetsIsNan) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto logits = distribute_tensor(at::ones({2, 4}), mesh, {Shard(1)}, std::nullopt);
    const LossParallel parallel;
    const auto loss = at::cross_entropy_loss(logits, at::full({2}, -100, at::kLong));
    EXPECT_TRUE(std::isnan(to_local(loss).item<double>()));
  });
}

// For other uses of log_softmax the sum of the incoming gradient over the classes takes an all-reduce.
TEST(LossParallel, GradientsOfOtherUsesOfLogSoftmaxAreCorrect) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    const auto whole = LossInputs({.shape = {5, 7}}).logits;
    const auto target = LossInputs({.shape = {5, 7}}).target;
    const auto run = [&](const at::Tensor& x) {
      const auto log_probabilities = at::log_softmax(x, 1);
      const auto entropy = -(log_probabilities.exp() * log_probabilities).sum();
      return at::nll_loss(log_probabilities, target) + 0.1 * entropy - 0.05 * log_probabilities.sum();
    };
    auto plain = whole.clone().set_requires_grad(true);
    run(plain).backward();
    auto logits = distribute_tensor(whole, mesh, {Shard(1)}, std::nullopt).set_requires_grad(true);
    const LossParallel parallel;
    const auto loss = run(logits);
    loss.backward();
    expect_same(logits.grad(), plain.grad(), "entropy");
    expect_same(loss, run(plain), "entropy");
  });
}

TEST(LossParallel, BackwardAfterTheContextIsCorrect) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    for (const bool inside : {true, false}) {
      const LossCase c{.shape = {6, 9}, .weighted = true, .ignores = true};
      const LossInputs inputs(c);
      auto logits = distribute_tensor(inputs.logits, mesh, {Shard(1)}, std::nullopt).set_requires_grad(true);
      at::Tensor loss;
      const ImplicitReplication plain_is_alike;
      {
        const LossParallel parallel;
        EXPECT_TRUE(loss_parallel_enabled());
        loss = at::cross_entropy_loss(logits, inputs.target, inputs.weight);
        if (inside) seeded(loss).backward();
      }
      EXPECT_FALSE(loss_parallel_enabled());
      if (!inside) seeded(loss).backward();
      expect_same(logits.grad(), Expected(inputs, c).gradient, "outside");
    }
  });
}

TEST(LossParallel, SupportsLabelSmoothing) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
      for (const bool weighted : {false, true}) {
        const LossInputs inputs({.shape = {6, 9}, .weighted = weighted, .ignores = true});
        const auto run = [&](const at::Tensor& logits, const at::Tensor& target) {
          return at::cross_entropy_loss(logits, target, inputs.weight, reduction, -100, 0.2);
        };
        auto plain = inputs.logits.clone().set_requires_grad(true);
        const auto expected = run(plain, inputs.target);
        seeded(expected).backward();
        auto logits = distribute_tensor(inputs.logits, mesh, {Shard(1)}, std::nullopt).set_requires_grad(true);
        const LossParallel parallel;
        const auto loss = run(logits, inputs.target);
        auto whole = full_tensor(loss);
        seeded(whole).backward();
        expect_same(loss, expected, "smoothed");
        expect_same(logits.grad(), plain.grad(), "smoothed");
      }
    }
  });
}

TEST(LossParallel, ComputesHalfPrecisionInFloat) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    const LossInputs inputs({.shape = {6, 50}}, at::kBFloat16);
    auto plain = inputs.logits.to(at::kFloat).set_requires_grad(true);
    const auto expected = at::cross_entropy_loss(plain, inputs.target);
    expected.backward();
    auto logits = distribute_tensor(inputs.logits, mesh, {Shard(1)}, std::nullopt).set_requires_grad(true);
    const LossParallel parallel;
    const auto loss = at::cross_entropy_loss(logits, inputs.target);
    loss.backward();
    EXPECT_EQ(loss.scalar_type(), at::kBFloat16);
    EXPECT_NEAR(to_local(loss).item<double>(), expected.item<double>(), 0.02 * expected.item<double>());
    const auto gradient = full_tensor(logits.grad()).to(at::kFloat);
    EXPECT_LT((gradient - plain.grad()).norm().item<double>(), 0.02 * plain.grad().norm().item<double>());
  });
}

TEST(LossParallel, DoesNotAffectPlainTensorsOrCallsOutsideTheContext) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const LossCase c{.shape = {6, 9}};
    const LossInputs inputs(c);
    const Expected expected(inputs, c);
    {
      const LossParallel parallel;
      expect_same(at::cross_entropy_loss(inputs.logits, inputs.target), expected.loss, "plain");
    }
    CommDebugMode count;
    const auto rows = distribute_tensor(inputs.logits, mesh, {Shard(0)}, std::nullopt);
    const auto targets = distribute_tensor(inputs.target, mesh, {Shard(0)}, std::nullopt);
    expect_same(at::cross_entropy_loss(rows, targets), expected.loss, "rows");
  });
}

TEST(LossParallel, ErrorsNameTheRequirements) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const LossInputs inputs({.shape = {4, 6}});
    const LossParallel parallel;
    const auto whole = distribute_tensor(inputs.logits, mesh, {Replicate()}, std::nullopt);
    EXPECT_THAT(
        error_of([&] { at::cross_entropy_loss(whole, inputs.target); }),
        HasSubstr(
            "loss_parallel() requires exactly one mesh dim to shard tensor dimension 1, but got placements (R) with 0 "
            "such mesh dim(s)."));
    const auto logits = distribute_tensor(inputs.logits, mesh, {Shard(1)}, std::nullopt);
    EXPECT_THAT(error_of([&] { at::cross_entropy_loss(logits, at::full({4}, 6, at::kLong)); }),
                HasSubstr("Target 6 is out of bounds: there are 6 classes"));
  });
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    const LossInputs inputs({.shape = {4, 6}});
    const LossParallel parallel;
    const auto twice = distribute_tensor(inputs.logits, mesh, {Shard(1), Shard(1)}, std::nullopt);
    EXPECT_THAT(error_of([&] { at::cross_entropy_loss(twice, inputs.target); }), HasSubstr("with 2 such mesh dim(s)"));
    const auto logits = distribute_tensor(inputs.logits, mesh, {Shard(0), Shard(1)}, std::nullopt);
    EXPECT_THAT(error_of([&] { at::cross_entropy_loss(logits, inputs.target); }),
                HasSubstr("target: found a plain tensor of shape [4] with logits of placements (S(0), S(1))"));
  });
}

}  // namespace
}  // namespace tessera::testing
