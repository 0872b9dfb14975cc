// Tests state dicts on an accelerator where each rank has its own device.
#include "tessera/state/sharded_tensor.h"
#include "tessera/state/state_dict.h"
#include "tests/devices/pretend.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Every rank must name the same devices for all shards. A rank without a shard participates.
TEST(PretendState, ShardMetadataHasTheDevicesOfTheRanksAndLoads) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, "pretend", {4}, {"dp"});
    const auto& group = mesh->group(0);
    const auto chunked = [&](const at::Tensor& values) {
      return chunk_sharded_tensor(values.to(mesh->device()), group);
    };
    const auto five = at::arange(10, at::kFloat).view({5, 2});
    const auto sharded = chunked(five);
    ASSERT_EQ(sharded->shards_metadata.size(), 3U);
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(sharded->shards_metadata[rank].placement, fmt::format("rank:{0}/pretend:{0}", rank));
    }
    EXPECT_TRUE(all_gather_sharded_tensor(*sharded).cpu().equal(five));

    SmallModel plain(2, at::kFloat, 7), model(2, at::kFloat, 23);
    shard(model, {.mesh = mesh});
    StateDict weights;
    for (const auto& [name, value] : get_model_state_dict(plain)) weights.set(name, chunked(value.tensor()));
    set_model_state_dict(model, weights);
    const auto whole = get_model_state_dict(model, {.full_state_dict = true});
    for (const auto& [name, value] : get_model_state_dict(plain)) {
      EXPECT_TRUE(whole.at(name).tensor().cpu().equal(value.tensor())) << to_string(name);
    }
  });
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
}

TEST(PretendState, ModelOnTwoDevicesIsRefused) {
  SmallModel model(2, at::kFloat);
  const auto weights = get_model_state_dict(model);
  auto& moved = model.layers[0]->own_parameters()[1];
  moved.parameter = moved.parameter.detach().to(pretend_device()).requires_grad_(true);
  *moved.slot = moved.parameter;
  const auto optimizer = optim::make_adamw(model, {});
  const auto states = get_optimizer_state_dict(model, {optimizer.get()});
  EXPECT_THAT(error_of([&] { set_model_state_dict(model, weights); }),
              HasSubstr("Multiple devices found: parameters are on cpu and on pretend:0"));
  EXPECT_THAT(error_of([&] { set_optimizer_state_dict(model, {optimizer.get()}, states); }),
              HasSubstr("Device mismatch: parameters are on cpu and on pretend:0"));
}

}  // namespace
}  // namespace tessera::testing
