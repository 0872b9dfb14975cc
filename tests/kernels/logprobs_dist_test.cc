// Tests log-probs over a sharded vocabulary against plain log_softmax, and against reference values of NeMo.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/kernels/logprobs/linear_logprobs.h"
#include "tessera/kernels/logprobs/logprobs.h"
#include "tessera/kernels/logprobs/next_token.h"
#include "tessera/kernels/logprobs/sampling.h"
#include "tessera/kernels/logprobs/vocab_topk.h"
#include "tests/dtensor/op_cases.h"
#include "tests/support/largest_allocation.h"

namespace tessera {
namespace {

using testing::check_cases;
using testing::check_cases_on;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::OpCase;
using testing::Tensors;

using WorldPtr = std::shared_ptr<comm::World>;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor drawn_logits(uint64_t seed, std::vector<int64_t> shape, at::ScalarType dtype = at::kFloat) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kFloat)).to(dtype);
}
at::Tensor drawn_ids(uint64_t seed, int64_t classes, std::vector<int64_t> shape) {
  return at::randint(0, classes, shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
}

// Returns the widths of the ranks' columns: as torch.chunk splits them, or lopsided, with most columns on the first
// rank and none on the last.
std::vector<int64_t> widths_of(int64_t classes, int ranks, bool lopsided) {
  std::vector<int64_t> widths;
  int64_t left = classes;
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t width = local_range(classes, ranks, rank).size;
    if (lopsided) width = rank + 1 == ranks ? (ranks == 1 ? left : 0) : rank + 2 == ranks ? left : (left + 1) / 2;
    widths.push_back(width);
    left -= width;
  }
  return widths;
}

kernels::VocabShard part_of(const WorldPtr& world, int64_t classes, bool lopsided = false) {
  const auto widths = widths_of(classes, world->size(), lopsided);
  int64_t start = 0;
  for (int rank = 0; rank < world->rank(); ++rank) start += widths[static_cast<size_t>(rank)];
  return {start, start + widths[static_cast<size_t>(world->rank())], world->group()};
}

// Returns a leaf with this rank's columns.
at::Tensor columns_of(const at::Tensor& logits, const kernels::VocabShard& part) {
  return logits.narrow(-1, part.start, part.end - part.start).contiguous().clone().set_requires_grad(true);
}

void on_worlds(const std::vector<int>& sizes, const std::function<void(const WorldPtr&)>& body) {
  for (const int size : sizes) comm::run_thread_ranks(size, [&](std::shared_ptr<comm::World> world) { body(world); });
}

at::Tensor plain_logprobs(const at::Tensor& logits, const at::Tensor& target) {
  const auto wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  const auto ignored = target.eq(kIgnoredLabel);
  return wide.log_softmax(-1)
      .gather(-1, target.masked_fill(ignored, 0).unsqueeze(-1))
      .squeeze(-1)
      .masked_fill(ignored, 0);
}

void expect_close(const at::Tensor& found, const at::Tensor& wanted, double tolerance, const std::string& what) {
  ASSERT_EQ(found.sizes(), wanted.sizes()) << what;
  EXPECT_TRUE(at::allclose(found.to(at::kDouble), wanted.to(at::kDouble), tolerance, tolerance, /*equal_nan=*/true))
      << what << '\n'
      << found << '\n'
      << wanted;
}

// Compares `ours`, on a rank's columns, with `plain`, on all columns. Values and the gradients of a weighted sum are
// compared.
using OfPart = std::function<at::Tensor(const at::Tensor&, const kernels::VocabShard&)>;
using OfWhole = std::function<at::Tensor(const at::Tensor&)>;
void expect_same(const at::Tensor& logits, const OfPart& ours, const OfWhole& plain, double tolerance,
                 const std::vector<int>& ranks = {1, 2, 3, 4}) {
  auto whole = logits.clone().set_requires_grad(true);
  const auto wanted = plain(whole);
  const auto weights = drawn_logits(99, wanted.sizes().vec(), wanted.scalar_type());
  wanted.mul(weights).sum().backward();
  on_worlds(ranks, [&](const WorldPtr& world) {
    for (const bool lopsided : {false, true}) {
      const auto part = part_of(world, logits.size(-1), lopsided);
      const auto columns = columns_of(logits, part);
      const auto found = ours(columns, part);
      const std::string what = fmt::format("{} ranks, {}", world->size(), lopsided ? "lopsided" : "chunks");
      expect_close(found, wanted.detach(), tolerance, what);
      found.mul(weights).sum().backward();
      EXPECT_EQ(columns.grad().scalar_type(), logits.scalar_type());
      expect_close(columns.grad(), whole.grad().narrow(-1, part.start, part.end - part.start), tolerance,
                   what + ", gradient");
    }
  });
}

at::Tensor some_targets(int64_t classes, std::vector<int64_t> shape) {
  auto target = drawn_ids(7, classes, shape);
  if (target.numel() > 3) target.view(-1)[2] = kIgnoredLabel;
  return target;
}

TEST(DistributedLogprob, EqualsLogSoftmaxForAnyVocabShardingAndShape) {
  for (const auto& shape :
       std::vector<std::vector<int64_t>>{{3, 5, 11}, {1, 1, 4}, {7, 3}, {2, 2, 3, 9}, {2, 40, 1030}}) {
    const auto logits = drawn_logits(1, shape, at::kDouble);
    const auto target = some_targets(shape.back(), {shape.begin(), shape.end() - 1});
    const auto plain = [&](const at::Tensor& t) { return plain_logprobs(t, target); };
    expect_same(
        logits,
        [&](const at::Tensor& t, const kernels::VocabShard& part) {
          return kernels::distributed_logprob(t, target, part);
        },
        plain, 1e-12);
    for (const int64_t chunk : {1, 3, 100}) {
      expect_same(logits,
                  [&](const at::Tensor& t, const kernels::VocabShard& part) {
                    return kernels::chunked_distributed_logprob(t, target, part, chunk);
                  },
                  plain, 1e-12, {2});
    }
  }
}

TEST(DistributedLogprob, ComputesHalfPrecisionInFloatWithGradientsInTheInputDtype) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto logits = drawn_logits(3, {2, 6, 50}, dtype);
    const auto target = some_targets(50, {2, 6});
    auto wide = logits.to(at::kFloat).set_requires_grad(true);
    const auto wanted = plain_logprobs(wide, target);
    wanted.sum().backward();
    on_worlds({2}, [&](const WorldPtr& world) {
      const auto part = part_of(world, 50);
      const auto columns = columns_of(logits, part);
      const auto found = kernels::distributed_logprob(columns, target, part);
      EXPECT_EQ(found.scalar_type(), at::kFloat);
      expect_close(found, wanted.detach(), 1e-5, "halves");
      found.sum().backward();
      EXPECT_EQ(columns.grad().scalar_type(), dtype);
      expect_close(columns.grad(), wide.grad().narrow(-1, part.start, part.end - part.start), 5e-3, "gradient");
    });
  }
}

TEST(DistributedLogprob, IgnoredTargetsGiveZeroEvenForNanRows) {
  on_worlds({2}, [](const WorldPtr& world) {
    auto logits = drawn_logits(3, {1, 4, 10});
    logits.select(1, 1).fill_(std::nan(""));
    const auto target = at::tensor({3, int(kIgnoredLabel), 9, int(kIgnoredLabel)}, at::kLong).view({1, 4});
    const auto part = part_of(world, 10);
    const auto columns = columns_of(logits, part);
    const auto found = kernels::distributed_logprob(columns, target, part);
    EXPECT_EQ(found[0][1].item<float>(), 0);
    EXPECT_TRUE(found.isfinite().all().item<bool>());
    found.sum().backward();
    EXPECT_TRUE(columns.grad().isfinite().all().item<bool>());
    for (const int row : {1, 3}) EXPECT_EQ(columns.grad()[0][row].abs().sum().item<float>(), 0);
    EXPECT_GT(columns.grad()[0][0].abs().sum().item<float>(), 0);
  });
}

TEST(DistributedLogprob, TargetsOutsideTheVocabularyAreErrorsOnAllRanks) {
  on_worlds({1, 3}, [](const WorldPtr& world) {
    const auto part = part_of(world, 10);
    const auto columns = columns_of(drawn_logits(3, {1, 4, 10}), part);
    for (const int wrong : {10, -1, -101}) {
      const auto target = at::tensor({3, 0, wrong, 9}, at::kLong).view({1, 4});
      EXPECT_THAT(testing::error_of([&] { kernels::distributed_logprob(columns, target, part); }),
                  HasSubstr(fmt::format("target 2: found id {}", wrong)));
      EXPECT_THAT(
          testing::error_of([&] { kernels::distributed_logprob_with_sampling(columns, target, part, {.top_k = 3}); }),
          HasSubstr(fmt::format("target 2: found id {}", wrong)));
      EXPECT_THAT(
          testing::error_of([&] { kernels::gather_logits_at_global_indices(columns, target.unsqueeze(2), part); }),
          HasSubstr(fmt::format("target 2: found id {}", wrong)));
    }
    EXPECT_THAT(testing::error_of([&] {
                  kernels::distributed_logprob(columns, at::zeros({4, 1}, at::kLong), part);
                }),
                HasSubstr("wanted int64 ids of [1, 4]"));
    EXPECT_THAT(
        testing::error_of([&] {
          kernels::distributed_logprob(columns, at::zeros({1, 4}, at::kLong), {part.start, part.end + 1, part.group});
        }),
        HasSubstr("columns for the vocabulary part"));
  });
}

TEST(DistributedLogprob, InferenceHasNoGraphAndSecondDerivativesAreRefused) {
  on_worlds({2}, [](const WorldPtr& world) {
    const auto part = part_of(world, 10);
    const auto columns = columns_of(drawn_logits(3, {1, 4, 10}), part);
    const auto target = drawn_ids(1, 10, {1, 4});
    EXPECT_FALSE(kernels::distributed_logprob(columns, target, part, true).requires_grad());
    const auto found = kernels::distributed_logprob(columns, target, part);
    EXPECT_TRUE(found.requires_grad());
    EXPECT_ANY_THROW(torch::autograd::grad({found.sum()}, {columns}, {}, true, true));
  });
}

TEST(DistributedLogprob, SupportsMinusInfinityAndEmptyVocabShards) {
  auto logits = drawn_logits(5, {1, 3, 8}, at::kDouble);
  logits.narrow(2, 0, 4).fill_(-kInfinity);  // all columns of one of two ranks
  const auto target = at::tensor({5, 7, 4}, at::kLong).view({1, 3});
  expect_same(
      logits,
      [&](const at::Tensor& t, const kernels::VocabShard& part) {
        return kernels::distributed_logprob(t, target, part);
      },
      [&](const at::Tensor& t) { return plain_logprobs(t, target); }, 1e-12);
  on_worlds({2}, [&](const WorldPtr& world) {
    const auto part = part_of(world, 8);
    const auto left_out = at::tensor({5, 1, 4}, at::kLong).view({1, 3});
    EXPECT_EQ(kernels::distributed_logprob(columns_of(logits, part), left_out, part)[0][1].item<double>(), -kInfinity);
    const auto columns = columns_of(logits, part);
    const auto entropy = kernels::chunked_distributed_entropy(columns, part, 2);
    const auto kept = logits.narrow(2, 4, 4).log_softmax(2);
    expect_close(entropy, (kept.exp() * kept).sum(2), 1e-12, "probability 0 adds nothing");
    entropy.sum().backward();
    EXPECT_TRUE(columns.grad().isfinite().all().item<bool>());
  });
}

TEST(DistributedGatherLogprob, AddsGradientsOfRepeatedIds) {
  auto ids = drawn_ids(4, 11, {2, 5, 3});
  ids.select(2, 1).copy_(ids.select(2, 0));
  ids[0][0][2] = kIgnoredLabel;
  for (const int64_t chunk : {1, 2, 100}) {
    expect_same(
        drawn_logits(2, {2, 5, 11}, at::kDouble),
        [&](const at::Tensor& t, const kernels::VocabShard& part) {
          return kernels::chunked_distributed_gather_logprob(t, ids, part, chunk);
        },
        [&](const at::Tensor& t) {
          const auto ignored = ids.eq(kIgnoredLabel);
          return t.log_softmax(-1).gather(-1, ids.masked_fill(ignored, 0)).masked_fill(ignored, 0);
        },
        1e-12);
  }
}

TEST(DistributedEntropy, EqualsTheSumOfPLogPWithGradients) {
  for (const int64_t chunk : {1, 2, 100}) {
    expect_same(
        drawn_logits(2, {2, 5, 11}, at::kDouble),
        [&](const at::Tensor& t, const kernels::VocabShard& part) {
          return kernels::chunked_distributed_entropy(t, part, chunk);
        },
        [](const at::Tensor& t) { return (t.softmax(-1) * t.log_softmax(-1)).sum(-1); }, 1e-12);
  }
}

TEST(DistributedCrossEntropy, EqualsPlainCrossEntropyWithGradientsOfTheStudentOnly) {
  const auto teacher = drawn_logits(8, {2, 5, 11}, at::kDouble);
  expect_same(
      drawn_logits(2, {2, 5, 11}, at::kDouble),
      [&](const at::Tensor& t, const kernels::VocabShard& part) {
        const auto target = columns_of(teacher, part);
        const auto loss = kernels::distributed_cross_entropy(t, target, part);
        EXPECT_FALSE(target.grad().defined());
        return loss;
      },
      [&](const at::Tensor& t) { return -(teacher.softmax(-1) * t.log_softmax(-1)).sum(-1); }, 1e-12);
  on_worlds({1}, [](const WorldPtr& world) {
    const auto part = part_of(world, 4);
    EXPECT_THAT(testing::error_of([&] {
                  kernels::distributed_cross_entropy(at::zeros({2, 4}), at::zeros({1, 4}), part);
                }),
                HasSubstr("wanted the same shape"));
  });
}

TEST(DistributedSoftmax, KeepsDtypeAndShardAndIsDifferentiable) {
  on_worlds({1, 2, 3}, [](const WorldPtr& world) {
    const auto logits = drawn_logits(2, {3, 5, 10}, at::kDouble);
    auto whole = logits.clone().set_requires_grad(true);
    const auto wanted = (whole / 1.5).log_softmax(-1);
    const auto weights = drawn_logits(3, {3, 5, 10}, at::kDouble);
    (wanted * weights).sum().backward();
    const auto part = part_of(world, 10);
    const auto mine = [&](const at::Tensor& t) { return t.narrow(-1, part.start, part.end - part.start); };
    const auto columns = columns_of(logits, part);
    const auto found = kernels::vocab_parallel_log_softmax(columns, part, 1.5);
    expect_close(found, mine(wanted.detach()), 1e-12, "log-softmax");
    (found * mine(weights)).sum().backward();
    expect_close(columns.grad(), mine(whole.grad()), 1e-12, "gradient");
    expect_close(kernels::compute_distributed_softmax(columns, part), mine(logits.softmax(-1)), 1e-12, "softmax");
    EXPECT_EQ(kernels::compute_distributed_log_softmax(columns.detach().to(at::kBFloat16), part).scalar_type(),
              at::kBFloat16);
  });
}

// ---- reference values of NeMo, measured with two ranks ----

double gradient_norm(const at::Tensor& columns, const kernels::VocabShard& part) {
  const auto square = columns.grad().to(at::kDouble).square().sum().view({1, 1});
  const auto all = at::empty({part.size(), 1}, at::kDouble);
  comm::all_gather_into(*part.group, all, square).wait();
  return all.sum().sqrt().item<double>();
}

TEST(DistributedLogprob, MatchesNemoReferenceValues) {
  on_worlds({2}, [](const WorldPtr& world) {
    const auto logits = drawn_logits(42, {4, 8, 1024});
    const auto target = drawn_ids(43, 1024, {4, 8});
    ASSERT_EQ(logits[0][0][0].item<float>(), 1.9269152879714966f);
    ASSERT_EQ(target[0][0].item<int64_t>(), 836);
    ASSERT_EQ(target.sum().item<int64_t>(), 16276);
    const auto part = part_of(world, 1024);
    for (const int64_t chunk : {0, 4, 3}) {
      const auto columns = columns_of(logits, part);
      const auto found = chunk ? kernels::chunked_distributed_logprob(columns, target, part, chunk)
                               : kernels::distributed_logprob(columns, target, part);
      EXPECT_NEAR(found.sum().item<double>(), -243.83624268, 1e-4);
      EXPECT_NEAR(found[0][0].item<double>(), -7.781678200, 2e-6);
      EXPECT_NEAR(found[3][7].item<double>(), -9.961088181, 2e-6);
      found.sum().backward();
      EXPECT_NEAR(gradient_norm(columns, part), 5.659249891953784, 1e-6);
    }
    const auto next = kernels::from_parallel_logits_to_logprobs(columns_of(logits, part), target, part);
    EXPECT_EQ(next.sizes(), (std::vector<int64_t>{4, 7}));
    EXPECT_NEAR(next.sum().item<double>(), -207.80986, 1e-4);
    EXPECT_NEAR(next[0][0].item<double>(), -6.999362, 2e-6);
  });
}

TEST(DistributedLogprob, MatchesNemoReferenceValuesForLargeLogits) {
  on_worlds({2}, [](const WorldPtr& world) {
    const auto logits = drawn_logits(42, {2, 3, 64}) * 100;
    const auto part = part_of(world, 64);
    const auto target = at::tensor({4, 0, 63, 49, 21, 58}, at::kLong).view({2, 3});
    const auto wanted = at::tensor({-144.4367, -77.2942, -131.666, -183.5847, -276.7741, -342.7098}).view({2, 3});
    expect_close(kernels::distributed_logprob(columns_of(logits, part), target, part), wanted, 1e-4, "targets");
    const auto of_zero = at::tensor({-19.587, -77.2942, -9.5376, -33.765, -270.6228, -171.073}).view({2, 3});
    expect_close(kernels::distributed_logprob(columns_of(logits, part), at::zeros_like(target), part), of_zero, 1e-4,
                 "zeros");
  });
}

TEST(DistributedGatherLogprob, MatchesNemoReferenceValues) {
  on_worlds({2}, [](const WorldPtr& world) {
    auto generator = at::detail::createCPUGenerator(1337);
    const auto logits = at::randn({2, 16, 256}, generator, at::TensorOptions(at::kFloat));
    const auto ids = at::randint(0, 256, {2, 16, 3}, generator, at::TensorOptions(at::kLong));
    const auto part = part_of(world, 256);
    for (const int64_t chunk : {5, 4, 3}) {
      const auto columns = columns_of(logits, part);
      const auto found = kernels::chunked_distributed_gather_logprob(columns, ids, part, chunk);
      EXPECT_NEAR(found.sum().item<double>(), -577.34045, 2e-4);
      EXPECT_NEAR(found[0][0][0].item<double>(), -4.847253, 2e-6);
      found.sum().backward();
      EXPECT_NEAR(gradient_norm(columns, part), 9.828840569569449, 1e-5);
      const auto again = columns_of(logits, part);
      const auto entropy = kernels::chunked_distributed_entropy(again, part, chunk);
      EXPECT_NEAR(entropy.sum().item<double>(), -161.4738007, 1e-4);
      EXPECT_NEAR(entropy[0][0].item<double>(), -5.011003494, 2e-6);
      entropy.sum().backward();
      EXPECT_NEAR(gradient_norm(again, part), 0.7166151277683056, 1e-6);
    }
  });
}

// ---- sampling ----

struct SampledCase {
  kernels::TrainingSamplingParams sampling;
  int64_t kept, kept_of_first, finite;
  double sum;
};

TEST(Sampling, MatchesNemoReferenceValues) {
  const auto logits = drawn_logits(42, {4, 16, 256});
  const auto target = drawn_ids(43, 256, {4, 16});
  const std::vector<SampledCase> cases = {{{.top_k = 10}, 640, 10, 2, -4.493180},
                                          {{.top_p = 0.9}, 10034, 159, 43, -236.416565},
                                          {{.top_k = 10, .top_p = 0.9}, 574, 9, 2, -4.345046}};
  for (const auto& each : cases) {
    const auto kept = kernels::apply_top_k_top_p(logits, each.sampling).second;
    EXPECT_EQ(kept.sum().item<int64_t>(), each.kept);
    EXPECT_EQ(kept[0][0].sum().item<int64_t>(), each.kept_of_first);
    on_worlds({1, 2, 3}, [&](const WorldPtr& world) {
      const auto part = part_of(world, 256);
      const auto found =
          kernels::distributed_logprob_with_sampling(columns_of(logits, part), target, part, each.sampling);
      const auto finite = found.isfinite();
      EXPECT_EQ(finite.sum().item<int64_t>(), each.finite);
      EXPECT_NEAR(found.masked_select(finite).sum().item<double>(), each.sum, 1e-4);
      EXPECT_TRUE(found.masked_select(finite.logical_not()).eq(-kInfinity).all().item<bool>());
    });
  }
}

// Any number of tokens and any split of the vocabulary is tested. Forward and backward must give the same bits for
// every chunk size.
TEST(Sampling, EqualsFilteringTheFullRowForAnyChunkSize) {
  const std::vector<kernels::TrainingSamplingParams> settings = {
      {.top_k = 3}, {.top_p = 0.7}, {.top_k = 4, .top_p = 0.8}, {.top_k = 0}};
  for (const auto& shape : std::vector<std::vector<int64_t>>{{3, 5, 13}, {1, 1, 7}, {2, 150, 20}}) {
    const auto logits = drawn_logits(11, shape, at::kDouble);
    const auto target = some_targets(shape.back(), {shape[0], shape[1]});
    for (const auto& sampling : settings) {
      auto whole = logits.clone().set_requires_grad(true);
      const auto wanted = plain_logprobs(kernels::apply_top_k_top_p(whole, sampling, 2).first, target);
      const auto finite = wanted.detach().isfinite();
      wanted.masked_select(finite).sum().backward();
      on_worlds({1, 2, 3, 4}, [&](const WorldPtr& world) {
        const auto part = part_of(world, shape.back(), world->size() == 3);
        at::Tensor first, first_gradient;
        for (const int64_t chunk : shape[1] > 100 ? std::vector<int64_t>{0, 100} : std::vector<int64_t>{0, 1, 2, 4}) {
          const auto columns = columns_of(logits, part);
          const auto found =
              chunk ? kernels::chunked_distributed_logprob_with_sampling(columns, target, part, chunk, sampling)
                    : kernels::distributed_logprob_with_sampling(columns, target, part, sampling);
          found.masked_select(finite).sum().backward();
          if (!first.defined()) {
            first = found.detach();
            first_gradient = columns.grad();
            expect_close(first, wanted.detach(), 1e-12, "values");
            expect_close(first_gradient, whole.grad().narrow(-1, part.start, part.end - part.start), 1e-12, "gradient");
          }
          EXPECT_TRUE(found.detach().equal(first)) << "chunk " << chunk;
          EXPECT_TRUE(columns.grad().equal(first_gradient)) << "chunk " << chunk;
        }
      });
    }
  }
}

TEST(Sampling, KeepsTiesOfTopKAndTheLargestOfTopP) {
  const auto row = at::tensor({1.0, 3.0, 2.0, 2.0, 2.0});
  const auto [filtered, kept] = kernels::apply_top_k_top_p(row, {.top_k = 2});
  EXPECT_TRUE(kept.equal(at::tensor({0, 1, 1, 1, 1}).to(at::kBool)));
  EXPECT_EQ(filtered[0].item<double>(), -kInfinity);
  EXPECT_EQ(kernels::apply_top_k_top_p(row, {.top_p = 1e-9}).second.sum().item<int64_t>(), 1);
  EXPECT_FALSE(kernels::apply_top_k_top_p(row, {.top_k = -1}).second.defined());
  EXPECT_FALSE(kernels::need_top_k_or_top_p_filtering({.top_k = 0, .temperature = 0.5}));
  EXPECT_THROW(kernels::apply_top_k_top_p(row, {.top_k = 6}), Error);
  EXPECT_THROW(kernels::apply_top_k_top_p(row, {.top_p = 1.5}), Error);
  auto leaf = row.clone().set_requires_grad(true);
  kernels::apply_top_k_top_p(leaf, {.top_k = 1}).first.softmax(0).select(0, 1).backward();
  EXPECT_EQ(leaf.grad().ne(0).sum().item<int64_t>(), 0);
}

TEST(Sampling, MasksInfiniteLogprobs) {
  const auto logprobs = at::tensor({-1.0, -kInfinity, -2.0, kInfinity});
  const auto mask = at::tensor({1, 1, 0, 0});
  EXPECT_TRUE(kernels::mask_out_neg_inf_logprobs(logprobs, mask, "test").equal(at::tensor({-1.0, 0.0, 0.0, 0.0})));
  EXPECT_TRUE(mask.equal(at::tensor({1, 1, 0, 0})));
}

// ---- top-k, gathering logits ----

TEST(VocabTopk, IsExactForTiesAndSmallVocabShards) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    auto logits = drawn_logits(1337, {2, 7, 9}, dtype);
    logits[0][0].fill_(0.5);  // all logits of this token are equal
    logits[1][1].fill_(-kInfinity);
    const auto [sorted, order] = logits.sort(/*stable=*/true, -1, /*descending=*/true);
    const auto wide = sorted.to(dtype == at::kDouble ? at::kDouble : at::kFloat);
    on_worlds({1, 2, 4}, [&, &sorted = wide, &order = order](const WorldPtr& world) {
      for (const bool lopsided : {false, true}) {
        const auto part = part_of(world, 9, lopsided);
        for (const int64_t k : {1, 5, 20}) {
          for (const auto chunk : std::vector<std::optional<int64_t>>{std::nullopt, 5, 2}) {
            const auto [values, ids] = kernels::distributed_vocab_topk(columns_of(logits, part), k, part, chunk);
            const int64_t found = std::min<int64_t>(k, 9);
            EXPECT_TRUE(values.equal(sorted.narrow(2, 0, found)));
            EXPECT_TRUE(ids.equal(order.narrow(2, 0, found))) << ids << order;
          }
        }
        EXPECT_TRUE(kernels::vocab_parallel_argmax(columns_of(logits, part), part).equal(order.select(2, 0)));
      }
    });
  }
}

TEST(GatherLogits, EqualsPlainGatherWithGradients) {
  auto ids = drawn_ids(4, 11, {2, 5, 3});
  ids[1][1][0] = kIgnoredLabel;
  expect_same(
      drawn_logits(2, {2, 5, 11}, at::kDouble),
      [&](const at::Tensor& t, const kernels::VocabShard& part) {
        return kernels::gather_logits_at_global_indices(t, ids, part, 2);
      },
      [&](const at::Tensor& t) {
        const auto ignored = ids.eq(kIgnoredLabel);
        return t.gather(-1, ids.masked_fill(ignored, 0)).masked_fill(ignored, 0);
      },
      1e-15);
}

// ---- next tokens ----

TEST(NextTokenLogprobs, PackedSequencesDoNotCrossBoundaries) {
  const std::vector<int64_t> lengths = {5, 1, 0, 4, 2};
  const auto logits = drawn_logits(6, {1, 14, 10}, at::kDouble);
  auto target = drawn_ids(5, 10, {1, 14});
  auto bounds = at::zeros({6}, at::kInt);
  for (int i = 0; i < 5; ++i) bounds[i + 1] = bounds[i].item<int>() + static_cast<int>(lengths[static_cast<size_t>(i)]);
  const int64_t width = 4;  // one sequence is truncated by a token
  const auto plain = [&](const at::Tensor& t) {
    std::vector<at::Tensor> rows;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const int64_t begin = bounds[static_cast<int64_t>(i)].item<int>(), kept = std::min(lengths[i] - 1, width - 1);
      auto row = at::zeros({width - 1}, t.options());
      if (kept > 0) {
        const auto logprobs = plain_logprobs(t[0].narrow(0, begin, kept), target[0].narrow(0, begin + 1, kept));
        row = at::cat({logprobs, row.narrow(0, kept, width - 1 - kept)});
      }
      rows.push_back(row);
    }
    return at::stack(rows);
  };
  for (const auto chunk : std::vector<std::optional<int64_t>>{std::nullopt, 8, 3}) {
    expect_same(
        logits,
        [&](const at::Tensor& t, const kernels::VocabShard& part) {
          return kernels::from_parallel_logits_to_logprobs_packed_sequences(t, target, bounds, width, part,
                                                                            {.chunk_size = chunk});
        },
        plain, 1e-12);
  }
  on_worlds({2}, [&](const WorldPtr& world) {
    const auto part = part_of(world, 10);
    const auto rolled = at::cat({target.narrow(1, 1, 13), target.narrow(1, 0, 1)}, 1);
    expect_close(kernels::from_parallel_logits_to_logprobs_packed_sequences(columns_of(logits, part), rolled, bounds,
                                                                            width, part, {.target_is_pre_rolled = true})
                     .detach(),
                 plain(logits), 1e-12, "rolled before");
    auto beyond = bounds.clone();
    beyond[5] = 15;
    EXPECT_THAT(testing::error_of([&] {
                  kernels::from_parallel_logits_to_logprobs_packed_sequences(columns_of(logits, part), target, beyond,
                                                                             width, part);
                }),
                HasSubstr("sequence 4 is [10, 15), wanted within the 14 tokens"));
  });
}

OpCase next_token_case(int64_t rows, int64_t length, int64_t classes, bool cut_ids,
                       kernels::LogprobOptions options = {}) {
  const auto ids = some_targets(classes, {rows, length});
  return {"log-probs of " + std::to_string(classes) + " classes", {{rows, length, classes}}, [=](const Tensors& t) {
            if (!is_dtensor(t[0])) return kernels::get_logprobs_from_vocab_parallel_logits(t[0], ids, options);
            const auto& mesh = device_mesh(t[0]);
            const Placements rows(static_cast<size_t>(mesh->ndim()), Replicate()), cut(rows.size(), Shard(0));
            const auto given = distribute_tensor(ids, mesh, cut_ids ? cut : rows, std::nullopt);
            return kernels::get_logprobs_from_vocab_parallel_logits(t[0], given, options);
          }};
}

TEST(NextTokenLogprobs, DTensorsGiveTheSameResultForEveryPlacement) {
  check_cases({2, 3, 4},
              {next_token_case(3, 5, 7, false), next_token_case(2, 4, 12, true),
               next_token_case(1, 2, 3, false, {.chunk_size = 1}),
               next_token_case(3, 3, 7, true, {.sampling_params = kernels::TrainingSamplingParams{.top_k = 7}})});
  check_cases_on({2, 2}, {next_token_case(3, 5, 7, true), next_token_case(2, 4, 12, false)}, 12, 4);
}

TEST(NextTokenLogprobs, PlainIdsGiveAFullPlainResultWithoutMovingLogits) {
  const auto logits = drawn_logits(3, {4, 6, 10}, at::kDouble);
  const auto ids = some_targets(10, {4, 6});
  const auto wanted = plain_logprobs(logits.narrow(1, 0, 5), ids.narrow(1, 1, 5));
  expect_close(kernels::get_logprobs_from_vocab_parallel_logits(logits, ids), wanted, 1e-12, "plain");
  on_ranks(4, {2, 2}, [&](const MeshPtr& mesh) {
    const auto cut =
        distribute_tensor(logits.clone().set_requires_grad(true), mesh, {Shard(0), Shard(2)}, std::nullopt);
    const CommDebugMode comm;
    const auto found = kernels::get_logprobs_from_vocab_parallel_logits(cut, ids);
    EXPECT_FALSE(is_dtensor(found));
    EXPECT_EQ(comm.total(), 2) << "the sums of each row, and the results of the other rows";
    expect_close(found.detach(), wanted, 1e-12, "whole");
    found.sum().backward();
    EXPECT_EQ(comm.total(), 2) << "nothing in the backward pass";
    auto wrong = ids.clone();
    wrong[1][3] = 10;
    EXPECT_THAT(testing::error_of([&] { kernels::get_logprobs_from_vocab_parallel_logits(cut, wrong); }),
                HasSubstr("row 1, token 3: found id 10"));
  });
}

// ---- without logits ----

at::Tensor plain_linear_logprobs(const Tensors& t, const at::Tensor& target, double softcap) {
  auto logits = at::linear(t[0], t[1]);
  if (softcap > 0) logits = (logits / softcap).tanh() * softcap;
  return plain_logprobs(logits, target);
}

OpCase linear_case(std::vector<int64_t> leading, int64_t classes, kernels::LinearLogprobOptions options,
                   bool cut_targets) {
  const auto target = some_targets(classes, leading);
  auto hidden = leading;
  hidden.push_back(3);
  OpCase made{
      "linear log-probs of " + std::to_string(classes) + " classes", {hidden, {classes, 3}}, [=](const Tensors& t) {
        if (!is_dtensor(t[0])) return plain_linear_logprobs(t, target, options.softcap);
        const auto& mesh = device_mesh(t[0]);
        const Placements cut(static_cast<size_t>(mesh->ndim()), Shard(0));
        return kernels::linear_logprobs(
            t[0], t[1], cut_targets ? distribute_tensor(target, mesh, cut, std::nullopt) : target, options);
      }};
  return made;
}

TEST(LinearLogprobs, EqualLogprobsOfFullLogitsOnEveryPlacement) {
  const std::vector<OpCase> cases = {linear_case({7}, 6, {.chunk_bytes = 1}, false),
                                     linear_case({2, 3}, 7, {.chunk_bytes = 100}, true),
                                     linear_case({3, 2}, 3, {.softcap = 0.7}, false)};
  check_cases({2, 3}, cases);
  check_cases_on({2, 2}, cases, 10, 8);
}

TEST(LinearLogprobs, VocabShardsEqualOneRank) {
  const auto hidden = drawn_logits(1, {2, 6, 5}, at::kDouble), weight = drawn_logits(2, {9, 5}, at::kDouble);
  const auto ids = some_targets(9, {2, 6});
  auto h = hidden.clone().set_requires_grad(true), w = weight.clone().set_requires_grad(true);
  const auto wanted = plain_logprobs(at::linear(h, w).narrow(1, 0, 5), ids.narrow(1, 1, 5));
  wanted.sum().backward();
  const auto alone = kernels::from_parallel_hidden_states_to_logprobs(hidden, weight, ids);
  expect_close(alone, wanted.detach(), 1e-12, "one rank");
  on_worlds({1, 2, 4}, [&](const WorldPtr& world) {
    const auto part = part_of(world, 9, true);
    auto own_h = hidden.clone().set_requires_grad(true);
    auto own_w = weight.narrow(0, part.start, part.end - part.start).clone().set_requires_grad(true);
    auto next = at::full_like(ids, kIgnoredLabel);
    next.narrow(1, 0, 5).copy_(ids.narrow(1, 1, 5));
    const auto found = kernels::linear_logprobs(own_h, own_w, next, part, {.chunk_bytes = 64});
    expect_close(found.detach().narrow(1, 0, 5), wanted.detach(), 1e-12, "values");
    found.sum().backward();
    expect_close(own_h.grad(), h.grad(), 1e-12, "hidden");
    expect_close(own_w.grad(), w.grad().narrow(0, part.start, part.end - part.start), 1e-12, "weight");
    next[0][0] = 9;
    EXPECT_THAT(testing::error_of([&] { kernels::linear_logprobs(own_h, own_w, next, part); }),
                HasSubstr("found id 9"));
  });
}

// ---- memory ----

TEST(DistributedLogprob, OnlyTheGradientAllocatesTokensByVocabulary) {
  on_worlds({2}, [](const WorldPtr& world) {
    constexpr int64_t kTokens = 512, kClasses = 4096;
    const auto part = part_of(world, kClasses);
    const auto target = drawn_ids(1, kClasses, {1, kTokens});
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      const auto columns = columns_of(drawn_logits(2, {1, kTokens, kClasses}, dtype), part);
      const auto bytes = columns.numel() * columns.itemsize();
      const auto record = std::make_shared<testing::LargestAllocation>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
      const auto found = kernels::distributed_logprob(columns, target, part);
      EXPECT_GE(record->largest, kTokens * 8) << "the recorder sees nothing";
      EXPECT_LE(record->largest, bytes / 8);
      found.sum().backward();
      EXPECT_EQ(record->largest, bytes) << "the gradient";
    }
  });
}

TEST(LinearLogprobs, AllocateAtMostAFewChunksOfLogits) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    constexpr int64_t kRows = 512, kClasses = 2048, kChunk = 64 << 10;
    const auto leaf = [&](std::vector<int64_t> shape, Placement how) {
      return distribute_tensor(drawn_logits(1, shape).set_requires_grad(true), mesh, {how}, std::nullopt);
    };
    const auto hidden = leaf({kRows, 8}, Replicate()), head = leaf({kClasses, 8}, Shard(0));
    const auto target = drawn_ids(1, kClasses, {kRows});
    const auto record = std::make_shared<testing::LargestAllocation>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, record);
    kernels::linear_logprobs(hidden, head, target, {.chunk_bytes = kChunk}).sum().backward();
    EXPECT_GE(record->largest, kClasses / 2 * 8 * 4) << "the recorder sees nothing";
    EXPECT_LE(record->largest, 4 * kChunk) << "all logits are " << kRows * kClasses * 4;
  });
}

}  // namespace
}  // namespace tessera
