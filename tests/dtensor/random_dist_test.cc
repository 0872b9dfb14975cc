// Tests that random numbers do not depend on the mesh or the placements, and that the factories of DTensors fill them.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>

#include <mutex>

#include "tessera/base/philox.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/random/random.h"
#include "tessera/dtensor/random/random_fill.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

TEST(Philox, MatchesRandom123KnownAnswers) {
  // Known answers of Random123's kat_vectors for philox4x32, 10 rounds.
  EXPECT_EQ(philox(0, 0, 0), (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

using Draw = std::function<at::Tensor(const at::Tensor& like)>;

// All random operations, on a tensor of any placement. Each returns the DTensor to compare.
std::vector<std::pair<std::string, Draw>> draws() {
  const auto in_place = [](auto fill) {
    return [fill](const at::Tensor& t) {
      auto x = at::empty_like(t);
      fill(x);
      return x;
    };
  };
  const auto odds = [](const at::Tensor& t) { return at::full_like(t, 0.3); };
  return {
      {"uniform_", in_place([](at::Tensor& x) { x.uniform_(-1, 2); })},
      {"normal_", in_place([](at::Tensor& x) { x.normal_(1, 3); })},
      {"exponential_", in_place([](at::Tensor& x) { x.exponential_(2); })},
      {"cauchy_", in_place([](at::Tensor& x) { x.cauchy_(1, 2); })},
      {"log_normal_", in_place([](at::Tensor& x) { x.log_normal_(0, 0.5); })},
      {"geometric_", in_place([](at::Tensor& x) { x.geometric_(0.25); })},
      {"random_", in_place([](at::Tensor& x) { x.random_(); })},
      {"random_ to", in_place([](at::Tensor& x) { x.random_(7); })},
      {"random_ from to", in_place([](at::Tensor& x) { x.random_(-5, 6); })},
      {"bernoulli_", in_place([](at::Tensor& x) { x.bernoulli_(0.3); })},
      {"bernoulli_ tensor",
       [=](const at::Tensor& t) {
         auto x = at::empty_like(t);
         x.bernoulli_(odds(t));
         return x;
       }},
      {"bernoulli", [=](const at::Tensor& t) { return at::bernoulli(odds(t)); }},
      {"bernoulli p", [](const at::Tensor& t) { return at::bernoulli(t, 0.4); }},
      {"rand_like", [](const at::Tensor& t) { return at::rand_like(t); }},
      {"rand_like double", [](const at::Tensor& t) { return at::rand_like(t, t.options().dtype(at::kDouble)); }},
      {"randn_like", [](const at::Tensor& t) { return at::randn_like(t); }},
      {"randint_like", [](const at::Tensor& t) { return at::randint_like(t, 3, 9); }},
      {"randn_like bfloat16", [](const at::Tensor& t) { return at::randn_like(t, t.options().dtype(at::kBFloat16)); }},
      {"rand_like bfloat16", [](const at::Tensor& t) { return at::rand_like(t, t.options().dtype(at::kBFloat16)); }},
      {"randn_like double", [](const at::Tensor& t) { return at::randn_like(t, t.options().dtype(at::kDouble)); }},
      {"randn_like complex",
       [](const at::Tensor& t) { return at::randn_like(t, t.options().dtype(at::kComplexFloat)); }},
      {"normal of tensors", [=](const at::Tensor& t) { return at::normal(at::ones_like(t), odds(t)); }},
      {"dropout", [](const at::Tensor& t) { return at::dropout(at::ones_like(t), 0.4, true); }},
      {"native_dropout",
       [](const at::Tensor& t) { return std::get<0>(at::native_dropout(at::ones_like(t), 0.4, true)); }},
      {"native_dropout mask",
       [](const at::Tensor& t) { return std::get<1>(at::native_dropout(at::ones_like(t), 0.4, true)); }},
      {"rrelu",
       [](const at::Tensor& t) {
         auto n = at::empty_like(t);
         return at::rrelu_with_noise(at::ones_like(t).neg(), n, 0.1, 0.3, true);
       }},
      {"xavier_uniform_", in_place([](at::Tensor& x) { torch::nn::init::xavier_uniform_(x); })},
      {"kaiming_normal_", in_place([](at::Tensor& x) { torch::nn::init::kaiming_normal_(x); })},
      {"multinomial", [=](const at::Tensor& t) { return at::multinomial(odds(t), 2); }},
      {"poisson", [](const at::Tensor& t) { return at::poisson(at::full_like(t, 3.5)); }},
      {"poisson of many", [](const at::Tensor& t) { return at::poisson(at::full_like(t, 40)); }},
      {"binomial", [=](const at::Tensor& t) { return at::binomial(at::full_like(t, 20), odds(t)); }},
      {"binomial of many", [=](const at::Tensor& t) { return at::binomial(at::full_like(t, 200), odds(t)); }},
      {"gamma", [](const at::Tensor& t) { return at::_standard_gamma(at::full_like(t, 3)); }},
      {"gamma of small shape", [=](const at::Tensor& t) { return at::_standard_gamma(odds(t)); }},
      {"dirichlet", [=](const at::Tensor& t) { return at::_sample_dirichlet(odds(t)); }},
      {"multinomial with replacement", [=](const at::Tensor& t) { return at::multinomial(odds(t), 5, true); }},
  };
}

const std::vector<std::vector<int64_t>> kShapes = {{9, 5}, {4, 8}, {1, 3}, {3, 7}};

// Results of all draws on all shapes, on a mesh of one rank: [shape][draw].
std::vector<std::vector<at::Tensor>> reference() {
  const auto mesh = init_device_mesh(comm::World::single(), "cpu", {1});
  std::vector<std::vector<at::Tensor>> all;
  for (const auto& shape : kShapes) {
    manual_seed(17, mesh);
    all.emplace_back();
    for (const auto& [name, draw] : draws()) all.back().push_back(full_tensor(draw(dtensor::empty(shape, mesh))));
  }
  return all;
}

class RandomOnMesh : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(RandomOnMesh, AnyPlacementsGiveTheBitsOfOneRank) {
  const auto wanted = reference();
  const int ranks = static_cast<int>(c10::multiply_integers(GetParam()));
  on_ranks(ranks, GetParam(), [&](const MeshPtr& mesh) {
    std::vector<Placements> layouts;
    if (mesh->ndim() == 1) {
      layouts = {{Replicate()}, {Shard(0)}, {Shard(1)}, {StridedShard(0, 2)}};
    } else {
      layouts = {{Shard(0), Shard(1)}, {Shard(0), Shard(0)}, {Replicate(), Shard(1)}, {StridedShard(0, 2), Shard(0)}};
    }
    for (size_t s = 0; s < kShapes.size(); ++s) {
      for (const auto& layout : layouts) {
        manual_seed(17, mesh);
        size_t next = 0;
        for (const auto& [name, draw] : draws()) {
          const at::Tensor drawn = draw(dtensor::empty(kShapes[s], mesh, layout));
          EXPECT_TRUE(at::equal(full_tensor(drawn), wanted[s][next]))
              << name << ' ' << to_string(layout) << " shape " << at::IntArrayRef(kShapes[s]) << '\n'
              << full_tensor(drawn) << wanted[s][next];
          ++next;
        }
        EXPECT_EQ(random_state(mesh).offset, draws().size() + 0) << "one stream for each operation";
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, RandomOnMesh,
                         ::testing::Values(std::vector<int64_t>{2}, std::vector<int64_t>{4},
                                           std::vector<int64_t>{2, 2}));

TEST(Random, DistributionsHaveTheExpectedMoments) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    manual_seed(3, mesh);
    constexpr int64_t kCount = 200000;
    const auto moments = [&](auto fill) {
      at::Tensor x = dtensor::empty({kCount}, mesh, {Shard(0)}, {.dtype = at::kFloat});
      fill(x);
      const at::Tensor all = full_tensor(x).to(at::kDouble);
      return std::pair{all.mean().item<double>(), all.std().item<double>()};
    };
    struct Row {
      const char* name;
      std::function<void(at::Tensor&)> fill;
      double mean, deviation;
    };
    const double odds = 0.3;
    const auto poisson = [](double rate) {
      return Row{"poisson", [=](at::Tensor& x) { x = at::poisson(at::full_like(x, rate)); }, rate, std::sqrt(rate)};
    };
    const auto binomial = [](double n, double p) {
      return Row{"binomial", [=](at::Tensor& x) { x = at::binomial(at::full_like(x, n), at::full_like(x, p)); }, n * p,
                 std::sqrt(n * p * (1 - p))};
    };
    const auto gamma = [](double shape) {
      return Row{"gamma", [=](at::Tensor& x) { x = at::_standard_gamma(at::full_like(x, shape)); }, shape,
                 std::sqrt(shape)};
    };
    for (const auto& row :
         std::vector<Row>{{"uniform", [](at::Tensor& x) { x.uniform_(-1, 2); }, 0.5, std::sqrt(0.75)},
                          {"normal", [](at::Tensor& x) { x.normal_(1, 3); }, 1, 3},
                          {"exponential", [](at::Tensor& x) { x.exponential_(2); }, 0.5, 0.5},
                          {"log_normal", [](at::Tensor& x) { x.log_normal_(0, 0.5); }, std::exp(0.125),
                           std::sqrt((std::exp(0.25) - 1) * std::exp(0.25))},
                          {"geometric", [](at::Tensor& x) { x.geometric_(0.25); }, 4, std::sqrt(12.0)},
                          {"bernoulli", [=](at::Tensor& x) { x.bernoulli_(odds); }, odds, std::sqrt(odds * (1 - odds))},
                          {"integers", [](at::Tensor& x) { x.random_(-5, 6); }, 0, std::sqrt(10.0)},
                          poisson(3.5),
                          poisson(40),
                          binomial(20, 0.3),
                          binomial(200, 0.4),
                          binomial(200, 0.95),
                          gamma(0.3),
                          gamma(3)}) {
      const auto [mean, deviation] = moments(row.fill);
      EXPECT_NEAR(mean, row.mean, 6 * row.deviation / std::sqrt(kCount)) << row.name;
      EXPECT_NEAR(deviation / row.deviation, 1, 0.03) << row.name;
    }
    const at::Tensor a = full_tensor(dtensor::randn({kCount}, mesh, {Shard(0)}));
    const at::Tensor b = full_tensor(dtensor::randn({kCount}, mesh, {Shard(0)}));
    EXPECT_NEAR((a * b).mean().item<double>(), 0, 0.02) << "two operations, two streams";
    EXPECT_NEAR((a.narrow(0, 0, kCount - 1) * a.narrow(0, 1, kCount - 1)).mean().item<double>(), 0, 0.02)
        << "neighbours";
    EXPECT_NEAR(at::abs(a).max().item<double>(), 4.5, 1.2) << "tails";
  });
}

TEST(Random, DistributionsHaveTheExpectedProbabilitiesAndGradients) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    manual_seed(3, mesh);
    constexpr int64_t kCount = 100000;
    const auto share = [&](const at::Tensor& drawn, double value) {
      return full_tensor(drawn).eq(value).to(at::kDouble).mean().item<double>();
    };
    const at::Tensor ones = dtensor::ones({kCount}, mesh, {Shard(0)});
    EXPECT_NEAR(share(at::poisson(ones * 2), 0), std::exp(-2.0), 0.006);
    EXPECT_NEAR(share(at::poisson(ones * 12), 12), 0.11437, 0.006);
    EXPECT_NEAR(share(at::binomial(ones * 4, ones * 0.5), 2), 0.375, 0.008);
    EXPECT_NEAR(share(at::binomial(ones * 100, ones * 0.5), 50), 0.079589, 0.005);
    EXPECT_EQ(share(at::binomial(ones * 7, ones), 7), 1);
    EXPECT_EQ(share(at::poisson(ones * 0), 0), 1);
    const at::Tensor shares =
        full_tensor(at::_sample_dirichlet(dtensor::ones({kCount, 4}, mesh, {Shard(1)})));  // the last dim is gathered
    EXPECT_TRUE(at::allclose(shares.sum(-1), at::ones({kCount})));
    EXPECT_TRUE(at::allclose(shares.mean(0), at::full({4}, 0.25), 0.01));
    EXPECT_THAT(error_of([&] { at::poisson(ones * -1); }), HasSubstr("negative rate"));
    const at::Tensor shape = dtensor::full({64}, 2.0, mesh, {Shard(0)}).requires_grad_(true);
    const at::Tensor drawn = at::_standard_gamma(shape);
    drawn.sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(shape.grad()),
                             at::_standard_gamma_grad(at::full({64}, 2.0), full_tensor(drawn.detach()))));
  });
}

TEST(Random, TensorOperationsGiveTheBitsOfTheLoop) {
  const RandomStreamKey key{0x123456789abcdef0, 5};
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kLong}) {
    const ShardRegion region(c10::IntArrayRef({7, 9}));
    const auto both = [&](const Distribution& d) {
      const at::Tensor loop = at::empty({7, 9}, type);
      const at::Tensor operations = at::empty({7, 9}, type);
      fill_random(loop, region, key, d);
      fill_by_operations(operations, region, key, d);
      return std::pair{loop, operations};
    };
    const auto exact = both({.kind = DistributionKind::kInteger, .low = -3, .range = 1000});
    EXPECT_TRUE(at::equal(exact.first, exact.second)) << c10::toString(type);
    const auto wide = both({.kind = DistributionKind::kInteger, .low = 0, .range = uint64_t{1} << 40 | 12345});
    EXPECT_TRUE(at::equal(wide.first, wide.second)) << c10::toString(type);
    if (type != at::kLong) {
      const auto uniform = both({DistributionKind::kUniform, -1, 3});
      EXPECT_TRUE(at::equal(uniform.first, uniform.second)) << c10::toString(type);
      for (const auto law : {DistributionKind::kNormal, DistributionKind::kLogNormal, DistributionKind::kExponential,
                             DistributionKind::kCauchy}) {
        const auto close = both({law, 1, 0.5});
        EXPECT_TRUE(at::allclose(close.first, close.second, 1e-2, 1e-4))
            << c10::toString(type) << static_cast<int>(law);
      }
    }
  }
}

TEST(Random, DefaultSeedComesFromTheFirstRank) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    CommDebugMode count;
    const at::Tensor first = dtensor::randn({6, 4}, mesh, {Shard(0), Shard(1)});
    EXPECT_GT(count.total(), 0) << "the seed is agreed on";
    CommDebugMode later;
    dtensor::randn({6, 4}, mesh, {Shard(0), Shard(1)});
    EXPECT_EQ(later.total(), 0);
    const at::Tensor whole = full_tensor(first);
    const RandomState state = random_state(mesh);
    set_random_state({state.seed, 0}, mesh);
    EXPECT_TRUE(at::equal(full_tensor(dtensor::randn({6, 4}, mesh)), whole));
  });
}

TEST(Random, ExplicitGeneratorIsUsedAndAdvances) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    manual_seed(1, mesh);
    const auto draw = [&](at::Generator generator) {
      at::Tensor x = dtensor::empty({5, 2}, mesh, {Shard(0)});
      x.normal_(0, 1, generator);
      return full_tensor(x);
    };
    at::Generator generator = at::detail::createCPUGenerator(99);
    const at::Tensor first = draw(generator);
    const at::Tensor second = draw(generator);
    EXPECT_FALSE(at::equal(first, second));
    EXPECT_TRUE(at::equal(first, draw(at::detail::createCPUGenerator(99))));
    EXPECT_EQ(random_state(mesh).offset, 0) << "the mesh's own stream is untouched";
  });
}

TEST(Random, RanksOutsideTheMeshKeepTheSameOffset) {
  comm::run_thread_ranks(3, [](std::shared_ptr<comm::World> world) {
    const auto pair = init_device_mesh(world, "cpu", {2});
    const auto all = init_device_mesh(world, "cpu", {3});
    manual_seed(5, all);
    at::rand_like(dtensor::ones({4}, pair, {Shard(0)}));
    dtensor::rand({4}, pair, {Shard(0)});
    EXPECT_EQ(random_state(all).offset, 2) << "rank " << world->rank();
    const at::Tensor common = full_tensor(dtensor::rand({7}, all, {Shard(0)}));
    at::Tensor own = dtensor::empty({7}, all);
    set_random_state({5, 2}, all);
    own.uniform_();
    EXPECT_TRUE(at::equal(common, to_local(own)));
  });
}

TEST(Random, MetaTensorsDrawNothingAndInvalidArgumentsAreErrors) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    manual_seed(5, mesh);
    at::Tensor meta = distribute_tensor(at::empty({4, 2}, at::kMeta), mesh, {Shard(0)});
    meta.uniform_();
    at::bernoulli(meta);
    EXPECT_EQ(random_state(mesh).offset, 0);
    at::Tensor partial = from_local(at::ones({4}), mesh, {Partial()});
    EXPECT_THAT(error_of([&] { partial.normal_(); }), HasSubstr("Sharding dimension mismatch"));
    EXPECT_EQ(placements(at::rand_like(partial))[0], Replicate());
    at::Tensor x = dtensor::ones({4}, mesh, {Shard(0)});
    EXPECT_THAT(error_of([&] { x.exponential_(-1); }), HasSubstr("out of range"));
    EXPECT_THAT(error_of([&] { x.random_(3, 3); }), HasSubstr("integers from 3 to 3"));
    EXPECT_THAT(error_of([&] { at::multinomial(x, 5); }), HasSubstr("5 samples of 4"));
  });
}

TEST(Random, DropoutScalesKeptValuesAndItsGradientUsesTheSameMask) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    manual_seed(5, mesh);
    const at::Tensor x = dtensor::ones({64, 8}, mesh, {Shard(0)}, {.requires_grad = true});
    const at::Tensor y = at::dropout(x, 0.25, true);
    y.sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(y.detach()), full_tensor(x.grad())));
    const at::Tensor kept = full_tensor(y.detach());
    EXPECT_TRUE(at::all(at::logical_or(kept == 0, at::isclose(kept, at::full({}, 1 / 0.75)))).item<bool>());
    const auto [out, mask] = at::native_dropout(x, 1.0, true);
    EXPECT_EQ(full_tensor(out).count_nonzero().item<int64_t>(), 0);
    EXPECT_TRUE(at::equal(full_tensor(std::get<0>(at::native_dropout(x, 0.5, false)).detach()), at::ones({64, 8})));
  });
}

TEST(Factories, GiveTheGlobalValuesWithoutCommunication) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    manual_seed(1, mesh);
    for (const auto& layout : std::vector<Placements>{{},
                                                      {Shard(0), Shard(0)},
                                                      {Shard(1), Replicate()},
                                                      {Replicate(), Shard(-1)},
                                                      {Partial(), Shard(0)},
                                                      {Partial(), Partial()},
                                                      {Partial(ReduceOp::kAvg), Replicate()},
                                                      {Partial(ReduceOp::kProduct), Shard(1)},
                                                      {Partial(ReduceOp::kMax), Partial(ReduceOp::kMax)},
                                                      {Shard(0), Partial(ReduceOp::kMin)}}) {
      for (const int64_t rows : {0, 1, 3, 5}) {
        const std::vector<int64_t> size = {rows, 3};
        CommDebugMode count;
        const at::Tensor zeros = dtensor::zeros(size, mesh, layout), ones = dtensor::ones(size, mesh, layout);
        const at::Tensor full = dtensor::full(size, 7, mesh, layout),
                         half = dtensor::full(size, 0.5, mesh, layout, {.dtype = at::kBFloat16});
        const uint64_t offset = random_state(mesh).offset;
        const at::Tensor rand = dtensor::rand(size, mesh, layout), randn = dtensor::randn(size, mesh, layout);
        const at::Tensor empty = dtensor::empty(size, mesh, layout, {.requires_grad = true});
        EXPECT_EQ(count.total(), 0);
        EXPECT_TRUE(empty.requires_grad() && empty.is_leaf());
        EXPECT_EQ(empty.sizes(), at::IntArrayRef(size));
        EXPECT_EQ(full.scalar_type(), at::kLong);
        EXPECT_TRUE(at::equal(full_tensor(zeros), at::zeros(size))) << to_string(layout);
        EXPECT_TRUE(at::equal(full_tensor(ones), at::ones(size))) << to_string(layout);
        EXPECT_TRUE(at::equal(full_tensor(half), at::full(size, 0.5, at::kBFloat16))) << to_string(layout);
        if (!layout.empty() && !layout[0].is_partial(ReduceOp::kAvg)) {  // integers have no average
          EXPECT_TRUE(at::equal(full_tensor(full), at::full(size, 7, at::kLong))) << to_string(layout);
        }
        set_random_state({1, offset}, mesh);
        EXPECT_TRUE(at::equal(full_tensor(rand), full_tensor(dtensor::rand(size, mesh)))) << to_string(layout);
        EXPECT_TRUE(at::equal(full_tensor(randn), full_tensor(dtensor::randn(size, mesh)))) << to_string(layout);
      }
    }
    EXPECT_THAT(error_of([&] { dtensor::zeros({3}, mesh, {Shard(0)}); }), HasSubstr("one for each dim"));
    EXPECT_THAT(error_of([&] { dtensor::zeros({3}, mesh, {Shard(1), Replicate()}); }), HasSubstr("sharded dim 1"));
    EXPECT_THAT(error_of([&] { dtensor::zeros({-3}, mesh); }), HasSubstr("found -3"));
    EXPECT_THAT(error_of([&] { dtensor::randint(3, 3, {2}, mesh); }), HasSubstr("wanted a range"));
  });
}

}  // namespace
}  // namespace tessera
