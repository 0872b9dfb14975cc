// Tests how values of state dicts are exchanged between ranks: ranges, boxes of any shape, and values that only rank 0
// has.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/fsdp1/state/state_dict_values.h"
#include "tessera/state/broadcast_state.h"
#include "tessera/state/sharded_tensor.h"
#include "tests/fsdp1/net.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor range_values(const FlatRange& range) { return at::arange(range.begin, range.end, at::kFloat); }

TEST(ExchangeRanges, GivesEachRankTheRequestedRanges) {
  on_ranks(3, [](const WorldPtr& world) {
    auto& group = *world->group();
    const auto rank = static_cast<size_t>(world->rank());
    const std::vector<FlatRange> in_order = {{0, 4}, {4, 9}, {9, 10}}, shuffled = {{6, 10}, {}, {0, 6}};
    for (const auto& have : {in_order, shuffled}) {
      for (const std::vector<FlatRange>& want :
           {std::vector<FlatRange>{{0, 3}, {3, 8}, {8, 10}}, std::vector<FlatRange>{{0, 10}, {5, 7}, {}},
            std::vector<FlatRange>{{}, {}, {}}}) {
        for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
          const auto received = all_to_all_ranges(group, range_values(have[rank]).to(dtype), have, want, "x");
          EXPECT_TRUE(received.equal(range_values(want[rank]).to(dtype)));
        }
      }
      EXPECT_TRUE(all_gather_ranges(group, range_values(have[rank]), have, 10, "x").equal(range_values({0, 10})));
    }
    const std::vector<FlatRange> gap = {{0, 4}, {5, 9}, {9, 10}};
    EXPECT_THAT(message_of([&] {
                  all_to_all_ranges(group, range_values(gap[rank]), gap, {{}, {3, 6}, {}}, "x");
                }),
                HasSubstr("the ranks hold 2 of the 3 elements that rank 1 of the group needs from 3"));
    EXPECT_THAT(message_of([&] { all_gather_ranges(group, range_values(gap[rank]), gap, 10, "x"); }),
                HasSubstr("hold 9"));
  });
}

FlatTensorLayout layout_of(const std::shared_ptr<comm::Group>& group, bool contiguous) {
  return {.name = "w",
          .shape = {4, 3},
          .strides = contiguous ? std::vector<int64_t>{3, 1} : std::vector<int64_t>{1, 4},
          .contiguous = contiguous,
          .ranges = {{0, 7}, {7, 12}},
          .group = group};
}

TEST(StateDictValues, ConvertToLocalRangesFromShardsOfAnyShape) {
  on_ranks(2, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {2}, {"dp"});
    const at::Tensor whole = at::arange(12, at::kFloat).view({4, 3});
    const int rank = world->rank();
    // Two boxes are on rank 0 and one on rank 1. No box is a range of whole rows.
    auto boxes = std::make_shared<ShardedTensor>();
    boxes->size = {4, 3};
    boxes->group = world->group();
    boxes->shards_metadata = {
        {{0, 0}, {2, 2}, "rank:0/cpu"}, {{2, 0}, {2, 2}, "rank:0/cpu"}, {{0, 2}, {4, 1}, "rank:1/cpu"}};
    for (const auto& metadata : boxes->shards_metadata) {
      if ((metadata.placement == "rank:0/cpu") != (rank == 0)) continue;
      boxes->local_shards.push_back({whole.narrow(0, metadata.shard_offsets[0], metadata.shard_sizes[0])
                                         .narrow(1, metadata.shard_offsets[1], metadata.shard_sizes[1])
                                         .clone(),
                                     metadata});
    }
    const std::vector<StateValue> values = {whole,
                                            whole.t().contiguous().t(),
                                            chunk_sharded_tensor(whole, world->group()),
                                            boxes,
                                            distribute_tensor(whole, mesh, {Shard(0)}),
                                            distribute_tensor(whole, mesh, {Shard(1)}),
                                            distribute_tensor(whole, mesh, {Replicate()})};
    for (const bool contiguous : {true, false}) {
      auto layout = layout_of(world->group(), contiguous);
      const at::Tensor stored = contiguous ? whole.reshape({-1}) : whole.t().reshape({-1});
      const at::Tensor piece = stored.narrow(0, layout.own().begin, layout.own().numel());
      for (const auto& value : values) EXPECT_TRUE(to_local_range(layout, value).equal(piece)) << type_name(value);
      layout.sharded = false;
      layout.ranges = {{0, 12}, {0, 12}};
      for (const auto& value : values) EXPECT_TRUE(to_local_range(layout, value).equal(stored)) << type_name(value);
      layout = layout_of(world->group(), contiguous);

      EXPECT_TRUE(to_state_dict_value(layout, piece, {}).tensor().equal(whole));
      const auto first = to_state_dict_value(layout, piece, {.form = ValueForm::kWholeOnFirstRank});
      EXPECT_EQ(first.is_none(), rank == 1);
      if (rank == 0) {
        EXPECT_TRUE(first.tensor().equal(whole));
      }
      const auto chunks = to_state_dict_value(layout, piece, {.form = ValueForm::kSharded});
      EXPECT_TRUE(chunks.sharded()->local_shards.at(0).tensor.equal(whole.narrow(0, rank * 2, 2)));
      for (const auto& like : {values[4], values[5], values[6]}) {
        EXPECT_TRUE(to_layout_of(layout, piece, like.tensor()).equal(to_local(like.tensor())));
      }
    }
    const auto partial = from_local(whole, mesh, {Partial()});
    EXPECT_THAT(message_of([&] { to_local_range(layout_of(world->group(), true), partial); }),
                HasSubstr("still to be reduced"));
  });
}

TEST(StateDictValues, OnAHybridMeshAreShardedOverTheLastMeshDim) {
  on_ranks(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"replicate", "shard"});
    const at::Tensor whole = at::arange(15, at::kFloat).view({5, 3});
    FlatTensorLayout layout{.name = "w",
                            .shape = {5, 3},
                            .strides = {3, 1},
                            .ranges = {{0, 4}, {4, 8}, {8, 12}, {12, 15}},
                            .group = world->group()};
    const auto piece = whole.reshape({-1}).narrow(0, layout.own().begin, layout.own().numel());
    const auto value = to_state_dict_value(layout, piece, {.form = ValueForm::kSharded, .device_mesh = mesh});
    EXPECT_EQ(to_string(placements(value.tensor())), "(R, S(0))");
    EXPECT_TRUE(full_tensor(value.tensor()).equal(whole));
    EXPECT_TRUE(to_local_range(layout, value).equal(piece));
    // FSDP shards inside the replicas only.
    const auto& inner = mesh->group("shard");
    FlatTensorLayout half{.name = "w", .shape = {5, 3}, .strides = {3, 1}, .ranges = {{0, 7}, {7, 15}}, .group = inner};
    const auto half_piece = whole.reshape({-1}).narrow(0, half.own().begin, half.own().numel());
    const auto rows = to_state_dict_value(half, half_piece, {.form = ValueForm::kSharded, .device_mesh = mesh});
    EXPECT_TRUE(full_tensor(rows.tensor()).equal(whole));
    EXPECT_TRUE(to_local_range(half, rows).equal(half_piece));
    const auto other = init_device_mesh(world, "cpu", {2}, {"two"});
    EXPECT_THAT(
        message_of([&] { to_state_dict_value(layout, piece, {.form = ValueForm::kSharded, .device_mesh = other}); }),
        HasSubstr("does not have all ranks of the FSDP group"));
  });
}

TEST(BroadcastState, SendsTheStructureFirstAndThenTheTensors) {
  on_ranks(3, [](const WorldPtr& world) {
    auto& group = *world->group();
    const StateDict saved{{"a", at::arange(6, at::kFloat).view({2, 3}).t()},
                          {"step", at::ones({}, at::kLong)},
                          {"nested", StateDict{{0, StateList{1.5, at::ones({2}, at::kBFloat16), nullptr}}}},
                          {"empty", at::zeros({0, 2})}};
    const auto tree = broadcast_processed_state(group, world->rank() == 0 ? saved : StateDict{});
    EXPECT_EQ(tree.at("a").tensor().is_meta(), world->rank() != 0);
    EXPECT_EQ(tree.at("step").tensor().item<int64_t>(), 1);
    const auto received = broadcast_state(group, tree, c10::kCPU, "saved");
    EXPECT_EQ(state_difference(received, saved), "");
    const auto wrong = world->rank() == 1 ? StateValue(at::ones({2})) : StateValue(at::ones({}));
    EXPECT_EQ(world->rank() == 1, message_of([&] {
                                    broadcast_state(group, wrong, c10::kCPU, "x");
                                  }).find("should have zero dimension") != std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::testing
