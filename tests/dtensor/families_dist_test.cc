// Tests properties of the sharding rules that the conformance suite does not check: error messages, redistributed
// operands, and writes in place.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/dtensor/op_cases.h"

namespace tessera {
namespace {

using testing::check_cases;
using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using ::testing::StartsWith;
using testing::Tensors;

at::Tensor spread(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements) {
  return distribute_tensor(whole, mesh, placements, std::nullopt);
}

TEST(Pad, AllModesEqualThePlainOperation) {
  for (const int64_t rows : {1, 3, 9}) {
    std::vector<testing::OpCase> cases;
    for (const char* mode : {"constant", "reflect", "replicate", "circular"}) {
      cases.push_back({std::string("pad ") + mode, {{rows, 4, 6}}, [=](const Tensors& t) {
                         return at::pad(t[0], {2, 3}, mode);
                       }});
    }
    cases.push_back({"pad circular 2-d, cropped", {{rows, 2, 4, 6}}, [=](const Tensors& t) {
                       return at::pad(t[0], {-1, 2, 3, -1}, "circular");
                     }});
    check_cases({2}, cases);
  }
}

TEST(Pad, UnknownModeIsNamedInTheError) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = spread(at::ones({4, 4}), mesh, {Shard(0)});
    EXPECT_THAT(error_of([&] { at::pad(x, {1, 1}, "mirror"); }), HasSubstr("Unrecognized padding mode mirror"));
  });
}

TEST(View, FlattenAndUnflattenRestoreShardsOfTwoMeshDims) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    const at::Tensor whole = at::arange(4. * 8 * 3).view({4, 8, 3});
    for (const auto& how : {Placements{Shard(1), Shard(1)}, Placements{Shard(0), Shard(1)},
                            Placements{Shard(1), Shard(0)}, Placements{Shard(0), Shard(0)}}) {
      const at::Tensor x = spread(whole, mesh, how);
      const CommDebugMode comm;
      const at::Tensor flat = x.view({32, 3});
      const at::Tensor back = flat.view({4, 8, 3});
      EXPECT_EQ(comm.total(), 0);
      EXPECT_EQ(placements(back), how);
      EXPECT_TRUE(at::equal(full_tensor(flat), whole.view({32, 3}))) << to_string(how);
      EXPECT_TRUE(at::equal(full_tensor(back), whole)) << to_string(how);
    }
  });
}

TEST(ViewInPlace, SqueezeUpdatesThePlacements) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    at::Tensor x = spread(at::arange(12.).view({4, 1, 3}), mesh, {Shard(2)});
    x.squeeze_(1);
    EXPECT_EQ(placements(x), Placements{Shard(1)});
    EXPECT_TRUE(at::equal(full_tensor(x), at::arange(12.).view({4, 3})));
  });
}

TEST(AsStrided, AcceptsOnlyUnchangedShapeAndStrides) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    at::Tensor x = spread(at::ones({4, 3}), mesh, {Shard(0)}).requires_grad_();
    (at::as_strided(x, {4, 3}, {3, 1}) * 2).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(x.grad()), at::full({4, 3}, 2.)));
    EXPECT_THAT(error_of([&] {
                  at::as_strided(x, {3, 4}, {1, 3});
                }),
                ::testing::AllOf(StartsWith("Sharding dimension mismatch"),
                                 HasSubstr("as_strided not supported with DTensor")));
  });
}

TEST(GatheredView, WritesAreRefused) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = spread(at::zeros({4, 6}), mesh, {Shard(0)});
    EXPECT_THAT(error_of([&] { x.select(0, 1).fill_(1); }),
                ::testing::AllOf(StartsWith("Sharding dimension mismatch"), HasSubstr("would be lost")));
    EXPECT_THAT(error_of([&] { x.slice(0, 1, 3).view({12}).add_(1); }), StartsWith("Sharding dimension mismatch"));
    x.select(1, 2).fill_(1);
    EXPECT_EQ(full_tensor(x).sum().item<double>(), 4);
  });
}

TEST(CompositeOperation, KernelIsPreferredToDecomposition) {
  check_cases({2}, {{"mish", {{7, 6}}, [](const Tensors& t) { return at::mish(t[0]); }},
                    {"channel_shuffle", {{3, 4, 5}}, [](const Tensors& t) { return at::channel_shuffle(t[0], 2); }}});
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor flow = spread(at::ones({4, 6}), mesh, {Replicate()});
    const at::Tensor partial = from_local(at::full({4, 6}, 0.25 + mesh->local_rank(0)), mesh, {Partial()});
    for (const auto backward : {&at::silu_backward, &at::mish_backward}) {
      const CommDebugMode comm;
      const at::Tensor found = backward(flow, partial);
      EXPECT_EQ(comm.total(), 1);  // one collective for both uses of the operand
      EXPECT_TRUE(at::allclose(full_tensor(found), backward(at::ones({4, 6}), at::full({4, 6}, 1.5))));
    }
  });
}

TEST(ArgMax, CommunicatesOneValueAndOneIndexPerRow) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    at::Tensor x = at::arange(45.).view({9, 5}).remainder(7).contiguous();
    x[3][2] = x[8][4] = 50;  // equal values: the index of the first one is the result
    for (const double extra : {0., std::numeric_limits<double>::quiet_NaN()}) {
      x[7][1] = extra;
      for (const auto& how : {Placements{Shard(0)}, Placements{Shard(1)}}) {
        const at::Tensor spread_x = spread(x, mesh, how);
        const CommDebugMode comm;
        EXPECT_TRUE(at::equal(full_tensor(at::argmax(spread_x)), at::argmax(x)));
        EXPECT_EQ(comm.total(), 2);
        EXPECT_TRUE(at::equal(full_tensor(at::argmin(spread_x)), at::argmin(x)));
        for (const int64_t dim : {0, 1}) {
          EXPECT_TRUE(at::equal(full_tensor(at::argmax(spread_x, dim)), at::argmax(x, dim))) << dim;
          EXPECT_TRUE(at::equal(full_tensor(at::argmin(spread_x, dim, true)), at::argmin(x, dim, true))) << dim;
        }
      }
    }
  });
}

TEST(Convolution, ChannelsAndGroupsStaySharded) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = testing::random_tensor({3, 4, 5, 5}, 1, false);
    const at::Tensor w = testing::random_tensor({6, 4, 3, 3}, 2, false);
    const at::Tensor grouped = testing::random_tensor({6, 2, 3, 3}, 3, false);
    const auto check = [&](const Placements& x_how, const at::Tensor& weight, const Placements& w_how, int64_t groups,
                           const Placements& wanted) {
      const CommDebugMode comm;
      const at::Tensor y = at::conv2d(spread(x, mesh, x_how), spread(weight, mesh, w_how), {}, 1, 1, 1, groups);
      EXPECT_EQ(placements(y), wanted);
      EXPECT_EQ(comm.total(), 0);
      EXPECT_TRUE(at::allclose(full_tensor(y), at::conv2d(x, weight, {}, 1, 1, 1, groups)));
    };
    check({Shard(0)}, w, {Replicate()}, 1, {Shard(0)});
    check({Replicate()}, w, {Shard(0)}, 1, {Shard(1)});
    check({Shard(1)}, w, {Shard(1)}, 1, {Partial()});
    check({Shard(1)}, grouped, {Shard(0)}, 2, {Shard(1)});
    // Spatial dims are never sharded, because the kernel of a convolution reads over the edges of a shard.
    const at::Tensor y = at::conv2d(spread(x, mesh, {Shard(3)}), spread(w, mesh, {Replicate()}), {}, 1, 1);
    EXPECT_TRUE(at::allclose(full_tensor(y), at::conv2d(x, w, {}, 1, 1)));
  });
}

TEST(Factory, EyeOutWritesEachRanksShard) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    for (const auto& how : {Placements{Shard(0)}, Placements{Shard(1)}, Placements{Replicate()}}) {
      at::Tensor out = spread(at::full({7, 5}, 3.), mesh, how);
      at::eye_out(out, 7, 5);
      EXPECT_TRUE(at::equal(full_tensor(out), at::eye(7, 5))) << to_string(how);
    }
  });
}

TEST(PartialSum, AddsAReplicatedMaskOnce) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    for (const auto type : {at::kBool, at::kInt}) {
      const at::Tensor mask = at::arange(4).remainder(2).to(type);
      const at::Tensor sum = from_local(at::ones({4}), mesh, {Partial()});
      sum.add_(spread(mask, mesh, {Replicate()}));
      EXPECT_EQ(placements(sum), Placements{Partial()});
      EXPECT_TRUE(at::equal(full_tensor(sum), 2 + mask.to(at::kFloat))) << type;
    }
  });
}

TEST(Unscale, InfinityIsFoundOnAllRanks) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    at::Tensor whole = at::ones({4, 3});
    whole[3][1] = std::numeric_limits<float>::infinity();
    const at::Tensor gradient = spread(whole, mesh, {Shard(0)});
    at::Tensor found = at::zeros({1});
    at::_amp_foreach_non_finite_check_and_unscale_({gradient}, found, at::full({1}, 0.5));
    EXPECT_EQ(found.item<float>(), 1);
    EXPECT_EQ(full_tensor(gradient)[0][0].item<float>(), 0.5);
  });
}

TEST(LinalgErrors, AreRaisedOnEveryRank) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    at::Tensor matrices = at::eye(3, at::kDouble).repeat({4, 1, 1});
    matrices[3][1][1] = -1;  // in the shard of the last rank
    const at::Tensor spread_matrices = spread(matrices, mesh, {Shard(0)});
    std::string message;
    try {
      at::linalg_cholesky(spread_matrices);
    } catch (const c10::LinAlgError& error) {
      message = error.what_without_backtrace();
    }
    EXPECT_THAT(message, HasSubstr("(Batch element 3): The factorization could not be completed"));
    const CommDebugMode comm;  // the ranks still make the same collectives
    EXPECT_TRUE(at::equal(full_tensor(spread_matrices), matrices));
    EXPECT_EQ(comm.total(), 1);
    EXPECT_EQ(placements(at::linalg_cholesky(spread_matrices.abs() + 0)), Placements{Shard(0)});
  });
}

struct Statistics {
  at::Tensor mean = at::arange(4.) - 1;
  at::Tensor variance = at::arange(4.) + 0.5;
};

// Returns the full tensors of the output and of the updated statistics.
Tensors normalized(const at::Tensor& x, Statistics& statistics, bool legit) {
  const at::Tensor none;
  const at::Tensor out =
      legit ? std::get<0>(
                  at::_native_batch_norm_legit(x, none, none, statistics.mean, statistics.variance, true, 0.1, 1e-5))
            : std::get<0>(at::native_batch_norm(x, none, none, statistics.mean, statistics.variance, true, 0.1, 1e-5));
  return {out, statistics.mean, statistics.variance};
}

TEST(BatchNorm, UpdatesStatisticsOfAnyPlacement) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = testing::random_tensor({5, 4, 3}, 1, false).to(at::kFloat);
    const std::vector<Placement> of_statistics{Replicate(), Shard(0)};
    for (const bool legit : {false, true}) {
      Statistics plain;
      const Tensors wanted = normalized(x, plain, legit);
      for (const auto& how : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1)), Placement(Shard(2))}) {
        for (const auto& mean : of_statistics) {
          for (const auto& variance : of_statistics) {
            const std::string where = to_string(Placements{how, mean, variance});
            Statistics spread_statistics;
            spread_statistics.mean = spread(spread_statistics.mean, mesh, {mean});
            spread_statistics.variance = spread(spread_statistics.variance, mesh, {variance});
            const Tensors found = normalized(spread(x, mesh, {how}), spread_statistics, legit);
            for (size_t i = 0; i < wanted.size(); ++i) {
              EXPECT_TRUE(at::allclose(full_tensor(found[i]), wanted[i], 1e-5, 1e-6)) << where << " result " << i;
            }
            EXPECT_EQ(placements(spread_statistics.mean), Placements{mean}) << where;
            EXPECT_EQ(placements(spread_statistics.variance), Placements{variance}) << where;
          }
        }
      }
    }
  });
}

TEST(BatchNorm, UsesTheGlobalBatchForAnyPlacement) {
  std::vector<testing::OpCase> cases;
  for (const int64_t rows : {3, 8}) {
    cases.push_back({"batch_norm " + std::to_string(rows), {{rows, 4, 3}, {4}, {4}}, [](const Tensors& t) {
                       const auto statistic = [&](double value) {
                         const at::Tensor whole = at::full({4}, value, at::kDouble);
                         return is_dtensor(t[0]) ? spread(whole, device_mesh(t[0]), {Replicate()}) : whole;
                       };
                       return at::batch_norm(t[0], t[1], t[2], statistic(0), statistic(1), true, 0.1, 1e-5, false);
                     }});
  }
  check_cases({2}, cases);
}

TEST(BatchNorm, ChannelShardsAreKept) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = spread(testing::random_tensor({5, 4, 3}, 1, false).to(at::kFloat), mesh, {Shard(1)});
    Statistics statistics;
    statistics.mean = spread(statistics.mean, mesh, {Replicate()});
    statistics.variance = spread(statistics.variance, mesh, {Replicate()});
    const CommDebugMode comm;
    EXPECT_EQ(placements(normalized(x, statistics, true)[0]), Placements{Shard(1)});
    EXPECT_EQ(comm.total(), 2);  // the new statistics are gathered
    statistics.mean = from_local(at::zeros({4}), mesh, {Partial()});
    EXPECT_THAT(error_of([&] { normalized(x, statistics, true); }), StartsWith("Sharding dimension mismatch"));
  });
}

TEST(NoRule, TheErrorNamesOperationPlacementsAndRemedy) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = spread(at::ones({4}), mesh, {Shard(0)});
    EXPECT_THAT(error_of([&] { at::unique_consecutive(x.to(at::kLong)); }),
                ::testing::AllOf(HasSubstr("aten::unique_consecutive"), HasSubstr("S(0)"), HasSubstr("register_rule")));
  });
}

TEST(OneHot, KeepsPlacementsAndAllRanksRefuseInvalidIndices) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = at::tensor({1, 2, 3, 0}, at::kLong).view({2, 2});
    for (const Placement placement : {Placement(Shard(0)), Placement(Shard(1)), Placement(Replicate())}) {
      const at::Tensor x = spread(plain, mesh, {placement});
      for (const int64_t classes : {4, 7, -1}) {
        const at::Tensor found = at::one_hot(x, classes);
        EXPECT_EQ(placements(found), Placements{placement});
        EXPECT_TRUE(at::equal(full_tensor(found), at::one_hot(plain, classes)));
      }
      EXPECT_THAT(error_of([&] { at::one_hot(x, 3); }), HasSubstr("found index 3 for 3 classes"));
      EXPECT_THAT(error_of([&] { at::one_hot(x - 1, 3); }), HasSubstr("found index -1"));
      EXPECT_THAT(error_of([&] { at::one_hot(x.to(at::kInt), 4); }), HasSubstr("index tensor of type LongTensor"));
    }
    const at::Tensor none = spread(at::empty({0, 3}, at::kLong), mesh, {Shard(0)});
    EXPECT_EQ(at::one_hot(none, 5).sizes(), (std::vector<int64_t>{0, 3, 5}));
    EXPECT_THAT(error_of([&] { at::one_hot(none, -1); }), HasSubstr("number of classes from empty tensor"));
  });
}

TEST(Bincount, ShardsGiveAPartialOfTheGlobalLength) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = at::tensor({5, 0, 0, 2, 5}, at::kLong),
                     weights = at::tensor({0.5, 1.0, 2.0, 4.0, 8.0}, at::kDouble);
    const at::Tensor x = spread(plain, mesh, {Shard(0)}), w = spread(weights, mesh, {Replicate()});
    const CommDebugMode comm;
    EXPECT_EQ(placements(at::bincount(x)), Placements{Partial()});
    EXPECT_EQ(comm.total(), 2) << "the least and the largest value";
    EXPECT_EQ(placements(at::bincount(spread(plain, mesh, {Replicate()}))), Placements{Replicate()});
    for (const int64_t length : {0, 3, 9}) {
      EXPECT_TRUE(at::equal(full_tensor(at::bincount(x, {}, length)), at::bincount(plain, {}, length)));
      EXPECT_TRUE(at::equal(full_tensor(at::bincount(x, w, length)), at::bincount(plain, weights, length)));
    }
    EXPECT_THAT(error_of([&] { at::bincount(x - 1); }), HasSubstr("non-negative"));
    EXPECT_THAT(error_of([&] { at::bincount(x, weights); }), HasSubstr("argument 'weights' is a plain tensor"));
  });
}

// Composite operations read plain tensors that they make themselves, for example an identity matrix. Such a tensor
// counts as replicated. A plain tensor of the caller stays an error. An operation that writes to a plain tensor of its
// own raises an error with the name of the operation.
TEST(CompositeOperation, InternalPlainTensorsCountAsReplicated) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = testing::random_tensor({4, 4}, 1, false);
    const at::Tensor x = spread(plain, mesh, {Shard(0)});
    for (const int64_t power : {0, 1, 3}) {
      const at::Tensor found = full_tensor(at::linalg_matrix_power(x, power));
      EXPECT_TRUE(found.allclose(at::linalg_matrix_power(plain, power))) << power;
    }
    EXPECT_THAT(error_of([&] { at::cov(x, 1, at::ones({4}, at::kLong)); }), HasSubstr("plain tensor"));
    EXPECT_THAT(
        error_of([&] {
          at::pad_sequence({x, x});
        }),
        HasSubstr("aten::pad_sequence is not supported for DTensors: its implementation writes to a plain tensor"));
    EXPECT_THAT(error_of([&] { at::block_diag({x, x}); }), HasSubstr("aten::block_diag is not supported for DTensors"));
  });
}

}  // namespace
}  // namespace tessera
