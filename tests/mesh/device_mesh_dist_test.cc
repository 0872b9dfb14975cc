#include "tessera/mesh/device_mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape);
    return error.what();
  }
  return "no error";
}

TEST(DeviceMesh, LaysRanksOutRowMajorAndSlicesByName) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp", "tp"});
    EXPECT_THAT(mesh->ranks(), ElementsAre(0, 1, 2, 3));
    EXPECT_THAT(*mesh->coordinate(), ElementsAre(world->rank() / 2, world->rank() % 2));
    EXPECT_EQ(mesh->to_string(), "DeviceMesh((dp=2, tp=2), 'cpu')");
    const auto tp = mesh->slice({"tp"});
    EXPECT_EQ(tp->ndim(), 1);
    const int row = world->rank() / 2 * 2;
    EXPECT_THAT(tp->ranks(), ElementsAre(row, row + 1));
    EXPECT_EQ(tp->group(0), mesh->group("tp"));  // shared, not made twice
    at::Tensor ranks = at::full({1}, world->rank());
    comm::all_reduce(*tp->group(0), ranks).wait();
    EXPECT_EQ(ranks.item<int64_t>(), 2 * row + 1);
    EXPECT_EQ(mesh->slice({"dp", "tp"}), mesh);
  });
}

TEST(DeviceMesh, FlattenMakesOneGroupThatSliceFindsAgain) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp", "cp"});
    const auto flat = mesh->flatten("dp_cp");
    EXPECT_EQ(flat->size(), 4);
    EXPECT_EQ(flat->group(0), world->group());  // spans the world
    EXPECT_EQ(mesh->slice({"dp_cp"})->group(0), flat->group(0));
    EXPECT_EQ(*mesh->slice({"dp_cp"}), *flat);
    EXPECT_THAT(error_of([&] { mesh->slice({"dp"})->flatten("dp_cp")->slice({"dp_cp"}); mesh->slice({"cp"})->flatten("dp_cp"); }),
                HasSubstr("another name"));
  });
}

TEST(DeviceMesh, RanksOutsideAMeshHaveNoCoordinate) {
  comm::run_thread_ranks(3, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2});
    EXPECT_EQ(mesh->coordinate().has_value(), world->rank() < 2);
    if (world->rank() == 2) {
      EXPECT_THAT(error_of([&] { mesh->group(0); }), HasSubstr("not part of the mesh"));
    }
  });
}

TEST(DeviceMesh, EqualMeshesCompareEqualAndKeepTheirOwnIds) {
  const auto world = comm::World::single();
  const auto a = init_device_mesh(world, "cpu", {1}, {"dp"});
  const auto b = init_device_mesh(world, "cpu", {1}, {"dp"});
  const auto c = init_device_mesh(world, "cpu", {1}, {"tp"});
  EXPECT_EQ(*a, *b);
  EXPECT_EQ(a->hash(), b->hash());
  EXPECT_NE(a->id(), b->id());
  EXPECT_FALSE(*a == *c);
}

TEST(DeviceMesh, WrongUseIsNamed) {
  const auto world = comm::World::single();
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cuda:0", {1}); }), HasSubstr("without an index"));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {1, 1}, {"a", "a"}); }), HasSubstr("more than once"));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {1, 1}, {"a"}); }), HasSubstr("1 names for 2 dims"));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {2}); }), HasSubstr("more ranks than the world's 1"));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {int64_t{1} << 40, int64_t{1} << 40}); }),
              HasSubstr("more ranks than"));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {0}); }), HasSubstr("positive"));
  const auto mesh = init_device_mesh(world, "cpu", {1, 1}, {"dp", "tp"});
  EXPECT_THAT(error_of([&] { mesh->slice({"pp"}); }), HasSubstr("'pp', wanted one of 'dp', 'tp'"));
  EXPECT_THAT(error_of([&] { mesh->slice({"tp", "dp"}); }), HasSubstr("in the order of the mesh"));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {1})->slice({"dp"}); }), HasSubstr("without names"));
}

}  // namespace
}  // namespace tessera
