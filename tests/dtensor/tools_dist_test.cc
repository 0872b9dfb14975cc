// Tests the tools around DTensors: collectives on plain tensors, local_map, register_sharding, CommDebugMode, the log
// of redistributions, and pictures of placements.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <nlohmann/json.hpp>

#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/functional.h"
#include "tessera/dtensor/local_map.h"
#include "tessera/dtensor/redistribute/redistribution_log.h"
#include "tessera/dtensor/rules/register_sharding.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::on_ranks;

TEST(Functional, CollectivesReturnNewTensorsWithGradients) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    const functional::MeshAxis axis{mesh, 1};
    const auto r = static_cast<double>(mesh->local_rank(1));
    const at::Tensor x = (at::arange(8, at::kDouble).view({2, 4}) + 100 * r).set_requires_grad(true);
    const at::Tensor other = x.detach() + 100 * (1 - 2 * r);
    const at::Tensor weight = at::arange(1, 9, at::kDouble).view({2, 4}) * (r + 1);
    const auto gradient = [&](const at::Tensor& y, const at::Tensor& w) {
      return torch::autograd::grad({(y * w).sum()}, {x})[0];
    };

    const at::Tensor sum = functional::all_reduce(x, axis);
    EXPECT_TRUE(at::equal(sum, x + other));
    EXPECT_TRUE(at::equal(gradient(sum, weight), weight / (r + 1) * 3));
    const at::Tensor mean = functional::all_reduce(x, axis, ReduceOp::kAvg);
    EXPECT_TRUE(at::equal(mean, (x + other) / 2));
    EXPECT_TRUE(at::allclose(gradient(mean, weight), weight / (r + 1) * 1.5));
    EXPECT_TRUE(at::equal(functional::all_reduce(x.detach(), axis, ReduceOp::kMax), at::maximum(x, other)));

    for (const int64_t dim : {0, 1, -1}) {
      const at::Tensor all = functional::all_gather(x, axis, dim);
      EXPECT_TRUE(at::equal(all, r == 0 ? at::cat({x, other}, dim) : at::cat({other, x}, dim))) << dim;
      const at::Tensor w = at::ones_like(all) * (r + 1);
      EXPECT_TRUE(at::equal(gradient(all, w), at::full({2, 4}, 3.0, at::kDouble)));
      const at::Tensor part = functional::reduce_scatter(x, axis, dim);
      EXPECT_TRUE(at::equal(part, (x + other).chunk(2, dim)[static_cast<size_t>(r)])) << dim;
      const at::Tensor back = gradient(part, at::ones_like(part) * (r + 1));
      EXPECT_TRUE(at::equal(back, at::cat({at::ones_like(part), at::full_like(part, 2)}, dim))) << dim;
    }

    const at::Tensor even = functional::all_to_all(x, axis);
    EXPECT_TRUE(at::equal(even, r == 0 ? at::cat({x[0].unsqueeze(0), other[0].unsqueeze(0)})
                                       : at::cat({other[1].unsqueeze(0), x[1].unsqueeze(0)})));
    EXPECT_TRUE(at::equal(gradient(even, at::full({2, 4}, r + 1)),
                          at::tensor({1.0, 2.0}, at::kDouble).unsqueeze(1).expand({2, 4})));
    // Rank 0 sends both of its rows. Rank 1 sends one row and keeps one.
    const at::Tensor uneven =
        r == 0 ? functional::all_to_all(x, axis, {0, 1}, {0, 2}) : functional::all_to_all(x, axis, {2, 1}, {1, 1});
    EXPECT_TRUE(at::equal(uneven, r == 0 ? other.narrow(0, 0, 1) : at::cat({other, x.narrow(0, 1, 1)})));
    EXPECT_TRUE(at::equal(
        gradient(uneven, at::full_like(uneven, r + 1)),
        r == 0 ? at::full({2, 4}, 2.0, at::kDouble) : at::tensor({1.0, 2.0}, at::kDouble).unsqueeze(1).expand({2, 4})));

    const at::Tensor said = functional::broadcast(x, axis, 1);
    EXPECT_TRUE(at::equal(said, r == 1 ? x : other));
    EXPECT_TRUE(at::equal(gradient(said, at::full({2, 4}, r + 1)), at::full({2, 4}, r == 1 ? 3.0 : 0.0, at::kDouble)));

    const at::Tensor cube = functional::all_gather(x * x * x, axis).sum();
    const at::Tensor first = torch::autograd::grad({cube}, {x}, {}, true, /*create_graph=*/true)[0];
    EXPECT_TRUE(at::allclose(torch::autograd::grad({first.sum()}, {x})[0], x * 6 * 2)) << "twice differentiable";
  });
}

TEST(LocalMap, RunsOnLocalTensorsAndWrapsTheResults) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor a = at::arange(12, at::kDouble).view({3, 4}), b = at::arange(8, at::kDouble).view({4, 2});
    const auto columns = distribute_tensor(a.clone().set_requires_grad(true), mesh, {Shard(1)});
    const auto rows = distribute_tensor(b, mesh, {Shard(0)});
    const TensorsFunction product = [&](const std::vector<at::Tensor>& parts) {
      EXPECT_EQ(parts[0].sizes(), (at::IntArrayRef{3, 2}));
      return std::vector{at::mm(parts[0], parts[1])};
    };
    const LocalMapOptions::List in = {Placements{Shard(1)}, Placements{Shard(0)}};
    const auto mm = local_map(product, {.out_placements = {Placements{Partial()}}, .in_placements = in});
    const at::Tensor y = mm({columns, rows})[0];
    EXPECT_EQ(placements(y)[0], Partial());
    EXPECT_TRUE(at::equal(full_tensor(y), at::mm(a, b)));
    full_tensor(y).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(columns.grad()), b.sum(1).expand({3, 4})));

    const auto whole = distribute_tensor(a, mesh, {Replicate()});
    EXPECT_THAT(error_of([&] {
                  mm({whole, rows});
                }),
                HasSubstr("has a mismatched placements: arg placements is (R) but the input placements is (S(1))! If "
                          "redistribute_inputs is wanted, set redistribute_inputs=True to local_map."));
    const auto moving = local_map(
        product, {.out_placements = {Placements{Partial()}}, .in_placements = in, .redistribute_inputs = true});
    EXPECT_TRUE(at::equal(full_tensor(moving({whole, rows})[0]), at::mm(a, b)));
    EXPECT_THAT(error_of([&] { mm({columns}); }),
                HasSubstr("in_placements length 2 does not match the number of input args 1!"));
    const auto none = local_map(product, {.out_placements = {Placements{Partial()}},
                                          .in_placements = LocalMapOptions::List{std::nullopt, Placements{Shard(0)}}});
    EXPECT_THAT(error_of([&] { none({columns, rows}); }), HasSubstr("expects placements but received None!"));
    EXPECT_THAT(error_of([&] {
                  mm({at::Tensor(), rows});
                }),
                HasSubstr("Non-Tensor input 0 expects None placements but received (S(1))!"));
    const auto two = local_map(product, {.out_placements = {Placements{Partial()}, std::nullopt}});
    EXPECT_THAT(error_of([&] {
                  two({columns, rows});
                }),
                HasSubstr("local_map requires one PlacementType be provided for each output value, received 2 "
                          "out_placements but 1 is expected!"));
    const auto mixed = local_map(
        [](const std::vector<at::Tensor>& parts) {
          return std::vector{parts[0] * parts[1], parts[1]};
        },
        {.out_placements = {Placements{Shard(1)}, std::nullopt}});
    const auto results = mixed({columns, at::full({}, 3.0)});
    EXPECT_TRUE(is_dtensor(results[0]) && !is_dtensor(results[1]));
    EXPECT_TRUE(at::equal(full_tensor(results[0]), a * 3));
    EXPECT_FALSE(is_dtensor(mixed({at::ones({2}), at::ones({2})})[0]))
        << "without a DTensor the function runs as it is";
    const auto hinted = local_map([](const std::vector<at::Tensor>& parts) { return std::vector{parts[0]}; },
                                  {.out_placements = {Placements{Partial()}},
                                   .in_grad_placements = LocalMapOptions::List{Placements{Partial()}}});
    const auto leaf = distribute_tensor(at::ones({4}).set_requires_grad(true), mesh, {Replicate()});
    full_tensor(hinted({leaf})[0]).sum().backward();
    EXPECT_TRUE(at::equal(full_tensor(leaf.grad()), at::full({4}, 2.0)));
  });
}

at::Tensor scale_rows(const at::Tensor& x, double by, const at::Tensor& bias) { return x * by + bias; }

TEST(RegisterSharding, DefinesTheShardingOfACustomOperation) {
  static torch::Library library(torch::Library::FRAGMENT, "tessera_tools_test", std::nullopt, __FILE__, __LINE__);
  static const bool defined = [] {
    library.def("scale_rows(Tensor x, float by, Tensor bias) -> Tensor");
    library.impl("scale_rows", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(scale_rows)));
    library.impl("scale_rows", torch::dispatch(c10::DispatchKey::Meta, TORCH_FN(scale_rows)));
    register_sharding("tessera_tools_test::scale_rows", [](const OpCall& call) -> std::vector<AcceptableSharding> {
      if (call.inputs[0].dim() == 1) {
        return {{{Shard(0)}, {Shard(0)}}};  // too few: each argument needs a placement
      }
      return {{{Shard(0)}, {Shard(0), std::nullopt, Replicate()}}, {{Partial()}, {Partial(), std::nullopt, Partial()}}};
    });
    return true;
  }();
  ASSERT_TRUE(defined);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("tessera_tools_test::scale_rows", "")
                      .typed<at::Tensor(const at::Tensor&, double, const at::Tensor&)>();
  on_ranks(2, {2}, [&](const MeshPtr& mesh) {
    at::NoGradGuard no_grad;
    const at::Tensor x = at::arange(10, at::kDouble).view({5, 2}), bias = at::tensor({1.0, 2.0}, at::kDouble);
    const auto b = distribute_tensor(bias, mesh, {Replicate()});
    CommDebugMode count;
    const at::Tensor y = op.call(distribute_tensor(x, mesh, {Shard(0)}, std::nullopt), 3,
                                 distribute_tensor(bias, mesh, {Replicate()}, std::nullopt));
    EXPECT_EQ(count.total(), 0);
    EXPECT_EQ(placements(y)[0], Shard(0));
    EXPECT_TRUE(at::equal(full_tensor(y), x * 3 + bias));
    const at::Tensor columns = op.call(distribute_tensor(x, mesh, {Shard(1)}), 3, b);
    EXPECT_FALSE(placements(columns)[0].is_shard(1)) << "not acceptable";
    EXPECT_TRUE(at::equal(full_tensor(columns), x * 3 + bias));
    EXPECT_THAT(error_of([&] { op.call(distribute_tensor(bias, mesh, {Shard(0)}), 3, b); }),
                HasSubstr("found placements for 1 inputs, wanted 3"));
  });
}

TEST(RegisterSharding, OperationWithoutRuleLookupIsAnError) {
  const auto none = [](const OpCall&) -> std::vector<AcceptableSharding> { return {}; };
  for (const char* name : {"aten::linear", "aten::einsum", "aten::cross_entropy_loss", "aten::reshape"}) {
    EXPECT_THAT(error_of([&] { register_sharding(name, none); }),
                HasSubstr(std::string(name) + ": the operation is made of others"));
  }
  for (const char* name : {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_local_scalar_dense",
                           "aten::set_", "aten::squeeze_.dim"}) {
    EXPECT_THAT(error_of([&] { register_sharding(name, none); }),
                HasSubstr(std::string(name) + ": no rule is used for " + name));
  }
  EXPECT_THAT(error_of([&] { register_sharding("aten::adddd", none); }), HasSubstr("found no operation of that name"));
  EXPECT_THAT(error_of([&] { register_sharding("tessera_tools_test::missing", none); }),
              HasSubstr("Define it before its rule"));
  EXPECT_THAT(error_of([&] { register_rule("aten::linear", [](const OpCall&, Proposal&) {}); }),
              HasSubstr("made of others"));
  static torch::Library library(torch::Library::FRAGMENT, "tessera_tools_test", std::nullopt, __FILE__, __LINE__);
  static const bool defined = [] {
    library.def("composite(Tensor x) -> Tensor", [](const at::Tensor& x) { return x + x; });
    return true;
  }();
  ASSERT_TRUE(defined);
  EXPECT_THAT(error_of([&] { register_sharding("tessera_tools_test::composite", none); }),
              HasSubstr("may be registered for CompositeExplicitAutograd"));
}

TEST(RegisterSharding, OverridesTheBuiltInRuleOfAnOverload) {
  // The only acceptable sharding: all operands replicated.
  register_sharding("aten::special_xlog1py", [](const OpCall&) -> std::vector<AcceptableSharding> { return {}; });
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = at::arange(1, 5, at::kDouble);
    const auto x = distribute_tensor(plain, mesh, {Shard(0)});
    for (const at::Tensor& y : {at::special_xlog1py(2, x), at::special_xlog1py(x, 2), at::special_xlog1py(x, x)}) {
      EXPECT_EQ(placements(y)[0], Replicate());
    }
    EXPECT_TRUE(at::equal(full_tensor(at::special_xlog1py(2, x)), at::special_xlog1py(2, plain)));
  });
}

TEST(CommDebugMode, CountsBytesByKind) {
  on_ranks(4, {4}, [](const MeshPtr& mesh) {
    const auto shard = dtensor::ones({8, 4}, mesh, {Shard(0)});
    const auto part = dtensor::ones({8, 4}, mesh, {Partial()});
    CommDebugMode count;
    redistribute(shard, {Replicate()});
    redistribute(part, {Replicate()});
    redistribute(part, {Shard(0)});
    redistribute(shard, {Shard(1)});
    EXPECT_EQ(count.bytes(CommKind::kAllGather), 3 * 32);
    EXPECT_EQ(count.bytes(CommKind::kAllReduce), 2 * 3 * 128 / 4);
    EXPECT_EQ(count.bytes(CommKind::kReduceScatter), 3 * 32);
    EXPECT_EQ(count.bytes(CommKind::kAllToAll), 3 * 8);
    EXPECT_EQ(count.total(), 4);
    {
      CommDebugMode inner;
      comm::barrier(*mesh->group(0));
      functional::all_reduce(at::ones({2}), {mesh});
      EXPECT_EQ(inner.all_reduces(), 1) << "whoever starts it";
    }
    EXPECT_EQ(count.all_reduces(), 2);
    EXPECT_THAT(count.table(), HasSubstr("Global: 5 collectives"));
    EXPECT_THAT(count.table(), HasSubstr("  all_gather: 1, 96 bytes\n"));
    CommDebugMode::enter_module("layers.\"0\"");
    redistribute(shard, {Replicate()});
    CommDebugMode::leave_module("layers.\"0\"");
    const auto json = nlohmann::json::parse(count.json());
    EXPECT_EQ(json["Global"]["all_gather"], nlohmann::json::parse(R"({"count": 2, "bytes": 192})"));
    EXPECT_EQ(json["modules"], nlohmann::json::parse(R"({"layers.\"0\"": {"all_gather": {"count": 1, "bytes": 96}}})"));
  });
}

TEST(RedistributionLog, NamesTheOperationAndTheArgument) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto a = dtensor::ones({4, 6}, mesh, {Shard(1)}), b = dtensor::ones({4, 6}, mesh, {Shard(0)});
    RedistributionLog log;
    at::add(a, b);
    redistribute(a, {Replicate()});
    dtensor::ones({4}, mesh, {Partial()}).sum().item();
    ASSERT_EQ(log.records().size(), 3) << log.to_string();
    const auto& add = log.records()[0];
    EXPECT_EQ(add.cause, "aten::add.Tensor");
    EXPECT_FALSE(add.is_explicit);
    EXPECT_EQ(add.comm_counts.total(), 1);
    EXPECT_THAT(add.argument, ::testing::AnyOf("self", "other"));
    const auto& explicit_one = log.records()[1];
    EXPECT_EQ(explicit_one.to_string(), "redistribute: self [4, 6] (S(1)) -> (R), 1 collectives, 48 bytes");
    EXPECT_TRUE(explicit_one.is_explicit);
    EXPECT_EQ(log.records()[2].cause, "the value of a tensor");
    at::relu(a);
    EXPECT_EQ(log.records().size(), 3) << "nothing moved";
    at::add(a, b);
    const auto sums = log.by_cause();
    EXPECT_EQ(sums.size(), 3);
    EXPECT_EQ(sums.at("aten::add.Tensor").table("aten::add.Tensor"),
              "aten::add.Tensor: 2 collectives, 48 bytes\n  all_to_all: 2, 48 bytes\n");
  });
}

TEST(ExplicitRedistribution, ForbidsImplicitRedistribution) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto a = dtensor::ones({4, 6}, mesh, {Shard(1)}), b = dtensor::ones({4, 6}, mesh, {Shard(0)});
    const auto whole = dtensor::ones({4, 6}, mesh);
    {
      ExplicitRedistribution only_mine;
      EXPECT_THAT(
          error_of([&] { at::add(a, b); }),
          HasSubstr(
              "Implicit redistribution occurred for aten::add.Tensor while ExplicitRedistributionContext was active"));
      EXPECT_TRUE(at::equal(full_tensor(at::add(redistribute(a, {Shard(0)}), b)), at::full({4, 6}, 2.0)));
      EXPECT_TRUE(at::equal(full_tensor(at::add(whole, b)), at::full({4, 6}, 2.0))) << "cutting costs nothing";
      {
        ExplicitRedistribution strict({.strict = true});
        EXPECT_THAT(error_of([&] { at::add(whole, b); }),
                    HasSubstr("argument 'self' of shape [4, 6] would go from (R) to (S(0))"));
        ExplicitRedistribution allowed({.enable = false});
        at::add(a, b);
      }
      EXPECT_THAT(error_of([&] { at::add(a, b); }), HasSubstr("Implicit redistribution"));
    }
    EXPECT_TRUE(at::equal(full_tensor(at::add(a, b)), at::full({4, 6}, 2.0)));
  });
}

TEST(ToString, HasGlobalShapePlacementsAndLocalValues) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto t = distribute_tensor(at::arange(4, at::kLong), mesh, {Shard(0)}, std::nullopt);
    CommDebugMode count;
    const std::string text = str(t);
    EXPECT_EQ(count.total(), 0);
    for (const char* part : {"shape=[4]", "placements=(S(0))", "mesh=DeviceMesh((2), 'cpu')"}) {
      EXPECT_THAT(text, HasSubstr(part));
    }
    EXPECT_THAT(text, HasSubstr(mesh->rank() == 0 ? " 0\n 1\n" : " 2\n 3\n"));
  });
}

TEST(VisualizeSharding, ShowsTheRanksOfEachRegion) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    CommDebugMode count;
    EXPECT_EQ(visualize_sharding(dtensor::ones({5, 4}, mesh, {Shard(0), Shard(1)})),
              "shape [5, 4], (S(0), S(1)) on DeviceMesh((2, 2), 'cpu')\n"
              "        | col 0-1 | col 2-3\n"
              "row 0-2 | cpu:0   | cpu:1\n"
              "row 3-4 | cpu:2   | cpu:3\n");
    EXPECT_EQ(visualize_sharding(dtensor::ones({4}, mesh, {Partial(), Shard(0)})),
              "shape [4], (P(sum), S(0)) on DeviceMesh((2, 2), 'cpu')\n"
              "        |\n"
              "row 0-1 | cpu:0,2\n"
              "row 2-3 | cpu:1,3\n");
    EXPECT_THAT(visualize_sharding(dtensor::ones({8}, mesh, {StridedShard(0, 4), Replicate()})),
                HasSubstr("row 2 | cpu:0,1\nrow 3 | cpu:2,3\n"));
    EXPECT_THAT(error_of([&] {
                  visualize_sharding(dtensor::ones({2, 2, 2}, mesh));
                }),
                HasSubstr("visualize sharding supports only 1D or 2D DTensor"));
    EXPECT_EQ(count.total(), 0);
  });
}

}  // namespace
}  // namespace tessera
