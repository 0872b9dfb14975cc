// Tests how state dicts are gathered, broadcast and sharded over ranks.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/state/broadcast_state_dict.h"
#include "tessera/state/cpu_state_dict.h"
#include "tessera/state/gather_state_dict.h"
#include "tessera/state/sharded_tensor.h"
#include "tests/state/values.h"
#include "tests/support/ranks.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using WorldPtr = std::shared_ptr<comm::World>;

void with_threads(int size, const RankBody& body) { run_ranks({.size = size, .mode = RankMode::kThreads}, body); }

at::Tensor counted(std::vector<int64_t> shape) {
  int64_t count = 1;
  for (const auto size : shape) count *= size;
  return at::arange(count, at::kFloat).view(shape);
}

std::shared_ptr<ShardedTensor> sharded_of(const at::Tensor& whole, const WorldPtr& world,
                                          const std::vector<std::vector<ShardMetadata>>& boxes) {
  auto out = std::make_shared<ShardedTensor>();
  out->size = whole.sizes().vec();
  out->dtype = whole.scalar_type();
  out->group = world->group();
  for (const auto& box : boxes[static_cast<size_t>(world->rank())]) {
    at::Tensor part = whole;
    for (int64_t d = 0; d < whole.dim(); ++d) {
      part = part.narrow(d, box.shard_offsets[static_cast<size_t>(d)], box.shard_sizes[static_cast<size_t>(d)]);
    }
    out->local_shards.push_back({part.clone(), box});
  }
  return out;
}
ShardMetadata box(std::vector<int64_t> offsets, std::vector<int64_t> sizes) {
  return {std::move(offsets), std::move(sizes), ""};
}

TEST(ShardedTensor, ChunksMatchTorch) {
  with_threads(3, [](const WorldPtr& world) {
    for (const int64_t rows : {7, 4, 1, 0}) {
      const auto whole = counted({rows, 2});
      const auto sharded = chunk_sharded_tensor(whole, world->group());
      const int64_t chunk = (rows + 2) / 3, first = chunk * world->rank();
      EXPECT_EQ(sharded->local_shards.size(), first < rows ? 1u : 0u);
      EXPECT_EQ(static_cast<int64_t>(sharded->shards_metadata.size()), rows == 0 ? 0 : (rows + chunk - 1) / chunk);
      if (first < rows) {
        EXPECT_EQ(sharded->local_shards[0].metadata.shard_offsets, (std::vector<int64_t>{first, 0}));
        EXPECT_EQ(sharded->local_shards[0].metadata.placement, "rank:" + std::to_string(world->rank()) + "/cpu");
      }
      EXPECT_TRUE(all_gather_sharded_tensor(*sharded).equal(whole));
    }
    EXPECT_THAT(thrown_by([&] { chunk_sharded_tensor(at::zeros({}), world->group()); }), HasSubstr("without dims"));
  });
}

TEST(ShardedTensor, AllGathersShardsOfAnyShape) {
  with_threads(2, [](const WorldPtr& world) {
    const auto whole = counted({4, 6});
    // Rank 0 has two boxes. Rank 1 has two other boxes and an empty one.
    const auto mixed = sharded_of(
        whole, world,
        {{box({0, 0}, {2, 4}), box({2, 3}, {2, 3})}, {box({0, 4}, {2, 2}), box({4, 0}, {0, 6}), box({2, 0}, {2, 3})}});
    EXPECT_TRUE(all_gather_sharded_tensor(*mixed).equal(whole));
    const auto columns = sharded_of(whole, world, {{box({0, 0}, {4, 1})}, {box({0, 1}, {4, 5})}});
    EXPECT_TRUE(all_gather_sharded_tensor(*columns).equal(whole));
    const auto scalar = sharded_of(at::full({}, 5.0), world, {{}, {box({}, {})}});
    EXPECT_EQ(all_gather_sharded_tensor(*scalar).item<float>(), 5);
    const auto halves = sharded_of(whole.to(at::kBFloat16), world, {{box({0, 0}, {4, 6})}, {}});
    EXPECT_TRUE(all_gather_sharded_tensor(*halves).equal(whole.to(at::kBFloat16)));
  });
}

TEST(ShardedTensor, InvalidShardsAreErrorsOnAllRanks) {
  with_threads(2, [](const WorldPtr& world) {
    const auto whole = counted({4, 6});
    const auto error_of = [&](const std::vector<std::vector<ShardMetadata>>& boxes) {
      return thrown_by([&] { all_gather_sharded_tensor(*sharded_of(whole, world, boxes)); });
    };
    EXPECT_THAT(error_of({{box({0, 0}, {2, 6})}, {box({3, 0}, {1, 6})}}), HasSubstr("hold 18 of 24 elements"));
    EXPECT_THAT(error_of({{box({0, 0}, {3, 6})}, {box({2, 0}, {2, 6})}}), HasSubstr("ranks 0 and 1 overlap"));
    EXPECT_THAT(error_of({{box({0, 0}, {2, 6}), box({0, 0}, {2, 6})}, {}}), HasSubstr("overlap"));
    auto beyond = sharded_of(whole, world, {{box({0, 0}, {2, 6})}, {box({2, 0}, {2, 6})}});
    if (world->rank() == 1) beyond->local_shards[0].metadata.shard_offsets = {3, 0};
    EXPECT_THAT(thrown_by([&] { all_gather_sharded_tensor(*beyond); }),
                HasSubstr("rank 1 at [3, 0] of [2, 6] reaches beyond"));
    auto other = sharded_of(whole, world, {{box({0, 0}, {2, 6})}, {box({2, 0}, {2, 6})}});
    if (world->rank() == 1) other->local_shards[0].tensor = at::zeros({2, 5});
    EXPECT_THAT(thrown_by([&] { all_gather_sharded_tensor(*other); }), HasSubstr("a shard of rank 1 has shape [2, 5]"));
    if (world->rank() == 1) other->local_shards[0].tensor = at::zeros({2, 6}, at::kDouble);
    EXPECT_THAT(thrown_by([&] { all_gather_sharded_tensor(*other); }), HasSubstr("has dtype Double"));
    if (world->rank() == 1) other->size = {4, 7};
    EXPECT_THAT(thrown_by([&] { all_gather_sharded_tensor(*other); }), HasSubstr("rank 1"));
  });
}

TEST(ShardedTensor, RefusesAMissingGroupAndTensorsWithoutDims) {
  EXPECT_THAT(thrown_by([] { chunk_sharded_tensor(at::zeros({2}), nullptr); }), HasSubstr("found no group"));
  EXPECT_THAT(thrown_by([] { all_gather_sharded_tensor({}); }), HasSubstr("the tensor has no group"));
  StateDict local;
  EXPECT_THAT(thrown_by([&] { broadcast_state_dict({}, local, {}); }),
              HasSubstr("found no group, wanted the ranks that take part"));
  with_threads(1, [](const WorldPtr& world) {
    const auto refused = [&](const at::Tensor& full) {
      return thrown_by([&] { chunk_sharded_tensor(full, world->group()); });
    };
    EXPECT_THAT(refused({}), HasSubstr("found an undefined tensor, wanted a plain tensor with at least one dim"));
    EXPECT_THAT(refused(at::zeros({})), HasSubstr("wanted a plain tensor with at least one dim"));
    const auto mesh = init_device_mesh(world, "cpu", {1}, {"dp"});
    EXPECT_THAT(refused(distribute_tensor(at::zeros({2}), mesh, {Shard(0)}, std::nullopt)),
                HasSubstr("wanted a plain tensor"));
  });
}

TEST(GatherStateDict, GathersEveryDistributedValue) {
  with_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp", "tp"});
    const auto one = counted({5, 6}), two = counted({3, 7});
    StateDict dict{
        {"one", distribute_tensor(one, mesh, {Shard(0), Shard(1)}, std::nullopt)},
        {"list", StateList{distribute_tensor(two, mesh, {StridedShard(1, 2), Shard(1)}, std::nullopt), one, 4}},
        {"sharded", chunk_sharded_tensor(two, world->group())},
        {"tuple", StateTuple{{"text", nullptr}}}};
    const auto all = gather_state_dict(dict);
    EXPECT_TRUE(all.at("one").tensor().equal(one));
    EXPECT_TRUE(all.at("list").list()[0].tensor().equal(two));
    EXPECT_TRUE(all.at("sharded").tensor().equal(two));
    EXPECT_TRUE(same_values(all.at("tuple"), dict.at("tuple")));

    const auto some = gather_state_dict(dict, {.cpu_offload = true, .ranks_only = {0, 2}});
    EXPECT_EQ(some.size(), world->rank() % 2 == 0 ? 4u : 0u);
    const auto companion = create_cpu_state_dict(all);
    EXPECT_TRUE(same_values(gather_state_dict(dict, {.companion = &companion}), all));
    EXPECT_TRUE(same_values(companion, all));

    const auto parts = create_cpu_state_dict(dict);
    copy_state_dict(dict, parts);
    EXPECT_TRUE(same_values(parts, dict));
    EXPECT_TRUE(same_values(gather_state_dict(offload_state_dict_to_cpu(parts)), all));
    EXPECT_THAT(thrown_by([&] {
                  gather_state_dict({{"x", one}}, {.ranks_only = {0}});
                }),
                HasSubstr("Set options.group"));
    EXPECT_TRUE(gather_state_dict({{"x", one}}, {.ranks_only = {1}, .group = world->group()}).empty() ==
                (world->rank() != 1));
  });
}

// The function is called on every rank, whichever ranks get a result.
TEST(IterateStateDict, CallsTheFunctionOfEachKindOfLeafInOrder) {
  with_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {2}, {"dp"});
    const auto whole = counted({3, 2});
    const StateDict dict{{"t", whole},
                         {"nested", StateDict{{"s", chunk_sharded_tensor(whole, world->group())}, {"n", 7}}},
                         {"list", StateList{distribute_tensor(whole, mesh, {Shard(0)}, std::nullopt), nullptr}}};
    std::string called;
    const auto noting = [&](const char* kind) {
      return [&called, kind](const StateValue&) -> StateValue {
        called += kind;
        return kind;
      };
    };
    const LeafFunctions functions{
        .sharded_tensor_func = noting("S"), .dtensor_func = noting("D"), .tensor_func = noting("T")};
    const auto result = iterate_state_dict(dict, functions, {.ranks_only = {1}});
    EXPECT_EQ(called, "TSD");
    const StateDict changed{{"t", "T"}, {"nested", StateDict{{"s", "S"}, {"n", 7}}}, {"list", StateList{"D", nullptr}}};
    EXPECT_TRUE(same_values(result, world->rank() == 1 ? changed : StateDict()));
    // A leaf of a kind without a function is not changed.
    const auto gathered = iterate_state_dict(dict, {.sharded_tensor_func = [](const StateValue& value) -> StateValue {
                                               return all_gather_sharded_tensor(*value.sharded());
                                             }});
    EXPECT_TRUE(gathered.at("nested").dict().at("s").tensor().equal(whole));
    EXPECT_TRUE(is_dtensor(gathered.at("list").list()[0].tensor()));
  });
}

TEST(CpuStateDict, KeepsShardsAndToCpuGathersThem) {
  with_threads(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {2}, {"dp"});
    const auto whole = counted({3, 2});
    const auto tensor = distribute_tensor(whole, mesh, {Shard(0)}, std::nullopt);
    const auto local = to_local_if_dtensor(tensor);
    EXPECT_TRUE(get_cpu_state_dict(StateDict{{"w", tensor}}).at("w").tensor().equal(local));
    EXPECT_EQ(local.size(0), world->rank() == 0 ? 2 : 1);
    EXPECT_TRUE(to_cpu(tensor).tensor().equal(whole));
    const auto pending = from_local(at::ones({2}), mesh, {Partial()});
    EXPECT_TRUE(to_local_if_dtensor(pending).equal(at::ones({2})));  // not reduced
    EXPECT_TRUE(to_cpu(pending).tensor().equal(at::full({2}, 2.0)));
    const auto meta = from_local(at::empty({2}, at::kMeta), mesh, {Shard(0)});
    EXPECT_THAT(thrown_by([&] { to_cpu(meta); }), HasSubstr("meta device, which has no values"));
    EXPECT_THAT(thrown_by([&] { gather_state_dict({{"m", meta}}); }), HasSubstr("meta device"));
  });
}

// The shards of a whole tensor, from rank 0 or from a copy on each rank, must equal those of distribute_tensor. The
// test covers every pair of placements, with uneven and empty sizes.
TEST(BroadcastStateDict, ShardsForAnyPlacement) {
  const std::vector<Placement> each = {Replicate(), Shard(0), Shard(1), StridedShard(0, 2), StridedShard(1, 3)};
  with_threads(4, [&](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"a", "b"});
    for (const auto& shape : {std::vector<int64_t>{7, 5}, {3, 6}, {1, 2}, {0, 4}}) {
      const auto whole = counted(shape);
      for (size_t i = 0; i < each.size() * each.size(); ++i) {
        const Placements layout = {each[i / each.size()], each[i % each.size()]};
        const auto wanted = distribute_tensor(whole, mesh, layout, std::nullopt);
        StateDict sent{{"w", distribute_tensor(at::zeros_like(whole), mesh, layout, std::nullopt)}};
        StateDict cut{{"w", distribute_tensor(at::zeros_like(whole), mesh, layout, std::nullopt)}};
        const auto target = sent.at("w").tensor();
        const StateDict full{{"w", whole}};
        broadcast_state_dict(world->rank() == 0 ? full : StateDict(), sent, {.group = world->group()});
        distribute_state_dict(full, cut, at::kCPU);
        EXPECT_TRUE(same_values(sent.at("w"), wanted)) << to_string(layout);
        EXPECT_TRUE(same_values(cut.at("w"), wanted)) << to_string(layout);
        EXPECT_TRUE(target.is_same(sent.at("w").tensor()));
      }
    }
  });
}

TEST(BroadcastStateDict, LoadsTheValuesOfRankZero) {
  with_threads(3, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {3}, {"dp"});
    const auto whole = counted({4, 2});
    const auto make = [&] {
      return StateDict{{"d", distribute_tensor(at::zeros({4, 2}), mesh, {Shard(0)}, std::nullopt)},
                       {"meta", from_local(at::empty({world->rank() < 2 ? 2 : 0, 2}, at::kMeta), mesh, {Shard(0)},
                                           FromLocalOptions::contiguous({4, 2}))},
                       {"plain", at::zeros({4, 2})},
                       {"step", at::zeros({})},
                       {"n", 0},
                       {"gone", at::zeros({1})}};
    };
    StateDict full;
    if (world->rank() == 0) {
      full = {{"unknown", at::ones({9})}, {"n", 5}, {"d", whole}, {"meta", whole}, {"plain", whole},
              {"step", at::full({}, 3.0)}};
    }
    auto local = make();
    const auto plain = local.at("plain").tensor();
    broadcast_state_dict(full, local, {.group = world->group()});
    EXPECT_EQ(local.size(), 6u);
    EXPECT_TRUE(full_tensor(local.at("d").tensor()).equal(whole));
    EXPECT_TRUE(full_tensor(local.at("meta").tensor()).equal(whole));
    EXPECT_TRUE(plain.equal(whole));
    EXPECT_EQ(local.at("step").tensor().item<float>(), 3);
    EXPECT_EQ(local.at("n").integer(), 5);
    local = make();
    broadcast_state_dict(full, local, {.group = world->group(), .strict = true});
    EXPECT_FALSE(local.contains("gone"));
    EXPECT_EQ(local.size(), 5u);
    // If one rank refuses its part, no rank waits; all ranks raise its error.
    local = make();
    if (world->rank() == 2) local.set("d", distribute_tensor(at::zeros({2, 4}), mesh, {Replicate()}, std::nullopt));
    EXPECT_THAT(thrown_by([&] { broadcast_state_dict(full, local, {.group = world->group()}); }),
                HasSubstr("'d': has shape [4, 2], wanted [2, 4]"));
    if (world->rank() == 0) full.set("n", StateDict{{"x", whole}});
    EXPECT_THAT(thrown_by([&] { broadcast_state_dict(full, local, {.group = world->group()}); }),
                HasSubstr("Flatten it"));
  });
}

}  // namespace
}  // namespace tessera::testing
