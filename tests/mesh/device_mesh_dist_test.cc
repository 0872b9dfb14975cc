// DeviceMesh: layout of ranks, slices, flattened and unflattened dims, groups, and errors, with thread ranks and with a
// fake world of 16384 ranks.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/mesh/device_mesh.h"
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

TEST(DeviceMesh, RanksAreRowMajorAndSlicesAreByName) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp", "tp"});
    EXPECT_THAT(mesh->ranks(), ElementsAre(0, 1, 2, 3));
    EXPECT_THAT(*mesh->coordinate(), ElementsAre(world->rank() / 2, world->rank() % 2));
    EXPECT_EQ(mesh->to_string(), "DeviceMesh((dp=2, tp=2), 'cpu')");
    const auto tp = mesh->slice({"tp"});
    EXPECT_EQ(tp->ndim(), 1);
    const int row = world->rank() / 2 * 2;
    EXPECT_THAT(tp->ranks(), ElementsAre(row, row + 1));
    EXPECT_EQ(tp->group(0), mesh->group("tp"));  // the same object as the mesh has
    at::Tensor ranks = at::full({1}, world->rank());
    comm::all_reduce(*tp->group(0), ranks).wait();
    EXPECT_EQ(ranks.item<int64_t>(), 2 * row + 1);
    EXPECT_EQ(mesh->slice({"dp", "tp"}), mesh);
  });
}

TEST(DeviceMesh, ConcatenatesSlicesOfOneMesh) {
  comm::run_thread_ranks(8, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2, 2}, {"pp", "dp", "tp"});
    const auto joined = concatenate(mesh->slice({"tp"}), mesh->slice({"dp"}));
    EXPECT_EQ(*joined, *mesh->slice({"dp", "tp"})) << "in the order of the mesh";
    EXPECT_EQ(joined->group("tp"), mesh->group("tp"));
    EXPECT_EQ(concatenate(mesh->slice({"pp"}), mesh->slice({"dp", "tp"}))->to_string(), mesh->to_string());
    const auto halves = mesh->slice({"dp"})->unflatten("dp", {2, 1}, {"dp_replicate", "dp_shard"});
    EXPECT_THAT(error_of([&] { concatenate(halves->slice({"dp_shard"}), mesh->slice({"tp"})); }),
                HasSubstr("no slices of one mesh"));
    const auto other = init_device_mesh(world, "cpu", {2, 2, 2}, {"pp", "dp", "tp"});
    EXPECT_THAT(error_of([&] { concatenate(other->slice({"dp"}), mesh->slice({"tp"})); }),
                HasSubstr("no slices of one mesh"));
    EXPECT_THAT(error_of([&] { concatenate(mesh->slice({"pp", "dp"}), mesh->slice({"dp"})); }), HasSubstr("both have"));
    EXPECT_THAT(error_of([&] {
                  concatenate(mesh->slice({"dp", "tp"})->flatten("both"), mesh->slice({"pp"}));
                }),
                HasSubstr("no slices of one mesh"));
    const auto whole = mesh->unflatten("dp", {1, 2}, {"dp_replicate", "dp_shard"});
    EXPECT_EQ(*concatenate(whole->slice({"dp_shard"}), whole->slice({"tp"})), *whole->slice({"dp_shard", "tp"}));
  });
}

TEST(DeviceMesh, FlattenedDimIsFoundBySlice) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp", "cp"});
    const auto flat = mesh->flatten("dp_cp");
    EXPECT_EQ(flat->size(), 4);
    EXPECT_EQ(flat->group(0), world->group());  // the group of the whole world
    EXPECT_EQ(mesh->slice({"dp_cp"})->group(0), flat->group(0));
    EXPECT_EQ(*mesh->slice({"dp_cp"}), *flat);
    EXPECT_THAT(error_of([&] {
                  mesh->slice({"dp"})->flatten("dp_cp")->slice({"dp_cp"});
                  mesh->slice({"cp"})->flatten("dp_cp");
                }),
                HasSubstr("another name"));
  });
}

TEST(DeviceMesh, FlattenRefusesNamesOfRootDims) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp", "tp"});
    for (const auto& name : {"dp", "tp"}) {
      EXPECT_THAT(error_of([&] { mesh->flatten(name); }),
                  HasSubstr(std::string("'") + name +
                            "' already exists for submesh of the root mesh, whose dims are ('dp', 'tp')"));
    }
    EXPECT_THAT(error_of([&] { mesh->slice({"dp"})->flatten("tp"); }), HasSubstr("already exists"));
    EXPECT_EQ(mesh->slice({"dp"})->flatten("dp")->group(0), mesh->group("dp")) << "is that dim already";
    const auto split = mesh->unflatten("dp", {2, 1}, {"replicate", "shard"});
    EXPECT_THAT(error_of([&] { split->slice({"replicate", "shard"})->flatten("dp"); }), HasSubstr("already exists"));
    EXPECT_THAT(mesh->group("dp")->ranks(), ElementsAre(world->rank() % 2, world->rank() % 2 + 2));
  });
}

TEST(DeviceMesh, FlattenedNamesGiveGroupsAndDimsOfSlices) {
  comm::run_thread_ranks(8, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2, 2}, {"dp", "cp", "tp"});
    EXPECT_THAT(error_of([&] { mesh->group("dp_cp"); }), HasSubstr("Valid mesh_dim_names are ('dp', 'cp', 'tp')"));
    const auto flat = mesh->slice({"dp", "cp"})->flatten();
    EXPECT_EQ(mesh->group("dp_cp"), flat->group(0));
    EXPECT_EQ(mesh->slice({"tp"})->group("dp_cp"), flat->group(0));
    const auto both = mesh->slice({"dp_cp", "tp"});
    EXPECT_EQ(both->to_string(), "DeviceMesh((dp_cp=4, tp=2), 'cpu')");
    EXPECT_EQ(both->ranks(), mesh->ranks());
    EXPECT_THAT(*both->coordinate(), ElementsAre(world->rank() / 2, world->rank() % 2));
    EXPECT_THAT(both->groups(), ElementsAre(flat->group(0), mesh->group("tp")));
    EXPECT_THAT(mesh->groups(), ElementsAre(mesh->group("dp"), mesh->group("cp"), mesh->group("tp")));
    mesh->slice({"cp", "tp"})->flatten("inner");
    const auto outer = mesh->slice({"dp", "inner"});
    EXPECT_THAT(outer->group("inner")->ranks(), ElementsAre(world->rank() / 4 * 4, world->rank() / 4 * 4 + 1,
                                                            world->rank() / 4 * 4 + 2, world->rank() / 4 * 4 + 3));
    EXPECT_EQ(both->flatten("all")->group(0), world->group());
    EXPECT_EQ(both->slice({"tp"})->group(0), mesh->group("tp"));
    EXPECT_THAT(error_of([&] { mesh->slice({"tp", "dp_cp"}); }), HasSubstr("ascending order"));
    EXPECT_THAT(error_of([&] { mesh->slice({"dp_cp", "inner"}); }), HasSubstr("no dim in two of them"));
    EXPECT_THAT(error_of([&] { mesh->slice({"dp_cp", "pp"}); }), HasSubstr("Invalid mesh_dim_names ('pp')"));
    const auto split = mesh->unflatten("dp", {1, 2}, {"replicate", "shard"});
    split->slice({"shard", "cp"})->flatten("shard_cp");
    EXPECT_EQ(split->slice({"replicate", "shard_cp"})->to_string(), "DeviceMesh((replicate=1, shard_cp=4), 'cpu')");
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

TEST(DeviceMesh, EqualMeshesCompareEqualWithDifferentIds) {
  const auto world = comm::World::single();
  const auto a = init_device_mesh(world, "cpu", {1}, {"dp"});
  const auto b = init_device_mesh(world, "cpu", {1}, {"dp"});
  const auto c = init_device_mesh(world, "cpu", {1}, {"tp"});
  EXPECT_EQ(*a, *b);
  EXPECT_EQ(a->hash(), b->hash());
  EXPECT_NE(a->id(), b->id());
  EXPECT_FALSE(*a == *c);
}

TEST(DeviceMesh, InvalidArgumentsAreErrors) {
  const auto world = comm::World::single();
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cuda:0", {1}); }),
              HasSubstr("Device type with index is not supported but got cuda:0"));
  EXPECT_THAT(error_of([&] {
                init_device_mesh(world, "cpu", {1, 1}, {"a", "a"});
              }),
              HasSubstr("Each mesh_dim_name must be unique. Found 'a' more than once"));
  EXPECT_THAT(error_of([&] {
                init_device_mesh(world, "cpu", {1, 1}, {"a"});
              }),
              HasSubstr("mesh_shape and mesh_dim_names should have same length! Found 1 names for 2 dims"));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {2}); }),
              HasSubstr("Mesh should not be bigger than default world size 1"));
  EXPECT_THAT(error_of([&] {
                init_device_mesh(world, "cpu", {int64_t{1} << 40, int64_t{1} << 40});
              }),
              HasSubstr("bigger than default world size"));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {0}); }), HasSubstr("positive"));
  const auto mesh = init_device_mesh(world, "cpu", {1, 1}, {"dp", "tp"});
  EXPECT_THAT(error_of([&] { mesh->slice({"pp"}); }),
              HasSubstr("Invalid mesh_dim_names ('pp') specified. Valid mesh_dim_names are ('dp', 'tp')"));
  EXPECT_THAT(error_of([&] {
                mesh->slice({"tp", "dp"});
              }),
              HasSubstr("Mesh dim indices should be in ascending order."));
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "cpu", {1})->slice({"dp"}); }),
              HasSubstr("Cannot slice a DeviceMesh without mesh_dim_names!"));
}

TEST(DeviceMesh, UnflattenSplitsADimAndKeepsOtherGroups) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto flat = init_device_mesh(world, "cpu", {4}, {"dp"});
    const auto mesh = flat->unflatten("dp", {2, 2}, {"replicate", "shard"});
    EXPECT_THAT(mesh->shape(), ElementsAre(2, 2));
    EXPECT_THAT(*mesh->coordinate(), ElementsAre(world->rank() / 2, world->rank() % 2));
    EXPECT_EQ(mesh->slice({"replicate", "shard"})->flatten("both")->group(0), world->group());
    const auto wide = init_device_mesh(world, "cpu", {2, 2}, {"pp", "dp"});
    const auto deep = wide->unflatten("dp", {1, 2}, {"dp", "cp"});
    EXPECT_EQ(deep->to_string(), "DeviceMesh((pp=2, dp=1, cp=2), 'cpu')");
    EXPECT_EQ(deep->group("pp"), wide->group("pp"));
    EXPECT_THAT(deep->group("cp")->ranks(), ElementsAre(world->rank() / 2 * 2, world->rank() / 2 * 2 + 1));
    EXPECT_THAT(error_of([&] { flat->unflatten("dp", {2, 3}, {"a", "b"}); }), HasSubstr("whose product is 4"));
    EXPECT_THAT(error_of([&] { flat->unflatten("dp", {2, 2}, {"a"}); }), HasSubstr("1 names for 2 sizes"));
    EXPECT_THAT(error_of([&] { wide->unflatten("dp", {1, 2}, {"pp", "b"}); }), HasSubstr("must be unique"));
    EXPECT_THAT(error_of([&] { flat->unflatten(1, {2, 2}); }), HasSubstr("found dim 1, wanted 0..0"));
  });
}

TEST(DeviceMesh, SupportsAnyOrderOfRanks) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = make_device_mesh(world, "cpu", {3, 1, 2, 0}, {2, 2}, {"dp", "tp"});
    const std::vector<std::vector<int64_t>> places = {{1, 1}, {0, 1}, {1, 0}, {0, 0}};
    EXPECT_EQ(*mesh->coordinate(), places[world->rank()]);
    const bool first_row = world->rank() == 3 || world->rank() == 1;
    EXPECT_EQ(mesh->group("tp")->ranks(), first_row ? (std::vector<int>{3, 1}) : (std::vector<int>{2, 0}));
    at::Tensor sum = at::full({1}, world->rank());
    comm::all_reduce(*mesh->group("dp"), sum).wait();
    EXPECT_EQ(sum.item<int64_t>(), world->rank() == 3 || world->rank() == 2 ? 5 : 1);
    const auto flat = mesh->flatten("all");
    EXPECT_THAT(flat->group(0)->ranks(), ElementsAre(3, 1, 2, 0)) << "the order of the mesh, not of the world";
    EXPECT_EQ(mesh->group(std::vector<int64_t>{0, 1}), flat->group(0)) << "one group for the same ranks";
    EXPECT_THAT(error_of([&] { make_device_mesh(world, "cpu", {0, 0}, {2}); }), HasSubstr("found 0 more than once"));
    EXPECT_THAT(error_of([&] {
                  make_device_mesh(world, "cpu", {0, 4}, {2});
                }),
                HasSubstr("found 4, wanted ranks of the world"));
    EXPECT_THAT(error_of([&] { make_device_mesh(world, "cpu", {0, 1, 2}, {2}); }), HasSubstr("found 3 of them"));
  });
}

TEST(DeviceMesh, MeshFromGroupsReusesTheGroups) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const int rank = world->rank();
    const auto pair = world->new_group({rank / 2 * 2, rank / 2 * 2 + 1}, "pair");
    const auto one = mesh_from_groups(world, "cpu", {pair}, {}, {}, {"tp"});
    EXPECT_EQ(one->group("tp"), pair);
    EXPECT_THAT(*one->coordinate(), ElementsAre(rank % 2));
    const auto across = world->new_group({rank % 2, rank % 2 + 2}, "across");
    const auto two = mesh_from_groups(world, "cpu", {across, pair}, {0, 1, 2, 3}, {2, 2}, {"dp", "tp"});
    EXPECT_EQ(two->group("dp"), across);
    EXPECT_EQ(two->slice({"tp"})->group(0), pair);
    EXPECT_THAT(error_of([&] {
                  mesh_from_groups(world, "cpu", {across, pair});
                }),
                HasSubstr("Must pass mesh if passing multiple ProcessGroups"));
    EXPECT_THAT(error_of([&] {
                  mesh_from_groups(world, "cpu", {pair, across}, {0, 1, 2, 3}, {2, 2});
                }),
                HasSubstr("wanted this rank's row"));
  });
}

TEST(DeviceMesh, GroupsAreCreatedLazilyInLargeWorlds) {
  // No other rank exists, so any communication would hang.
  const auto world = comm::World::create({.rank = 4097, .size = 16384}, c10::make_intrusive<c10d::HashStore>());
  const auto mesh = init_device_mesh(world, "cpu", {8, 16, 16, 8}, {"pp", "dp", "cp", "tp"});
  const auto dp_cp = mesh->slice({"dp", "cp"})->flatten("dp_cp");
  const auto split = mesh->unflatten("dp", {2, 8}, {"replicate", "shard"});
  EXPECT_EQ(dp_cp->size(), 256);
  EXPECT_EQ(mesh->slice({"dp_cp"})->ranks(), dp_cp->ranks());
  EXPECT_EQ(split->slice({"replicate", "shard", "cp"})->size(), 256);
  EXPECT_EQ(world->open_groups(), 0);
}

TEST(DeviceMesh, EachUsedGroupIsCreatedOnce) {
  comm::run_thread_ranks(4, [](std::shared_ptr<comm::World> world) {
    const auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp", "tp"});
    EXPECT_EQ(world->open_groups(), 0);
    for (int round = 0; round < 3; ++round) {
      mesh->slice({"tp"})->group(0);
      mesh->group("tp");
      mesh->flatten("all")->group(0);
      mesh->group(std::vector<int64_t>{0, 1});
      mesh->slice({"all"})->group(0);
    }
    EXPECT_EQ(world->open_groups(), 2) << "tp and the world's; dp was not used";
  });
}

}  // namespace
}  // namespace tessera
