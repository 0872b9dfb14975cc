// Tests of distribute_module: partition, replication and the hooks around the call; and of ModuleTrace, which counts
// collectives by module.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/parallel/modules/distribute_module.h"
#include "tessera/parallel/modules/module_trace.h"
#include "tests/support/ranks.h"

namespace tessera {
namespace {

using testing::here;
using testing::test_device_type;

struct Linear : nn::Callable<Linear> {
  at::Tensor weight;
  Linear(int64_t in, int64_t out, double value) {
    weight = register_parameter("weight", weight, here(at::full({out, in}, value)));
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
};

struct Net : nn::Callable<Net> {
  std::shared_ptr<Linear> up, down;
  at::Tensor scale;
  explicit Net(double value) {
    up = register_module("up", std::make_shared<Linear>(4, 8, value));
    down = register_module("down", std::make_shared<Linear>(8, 4, value));
    scale = register_buffer("scale", scale, here(at::full({4}, value)), true);
  }
  at::Tensor forward(const at::Tensor& x) { return (*down)((*up)(x)) * scale; }
};

void on_two_ranks(const std::function<void(const MeshPtr&)>& body) {
  testing::run_ranks({.size = 2}, [&](const std::shared_ptr<comm::World>& world) {
    body(init_device_mesh(world, test_device_type(), {2}));
  });
}

// Shards by columns and by rows, as in tensor parallelism.
DistributeModuleOptions tensor_parallel() {
  return {.partition_fn =
              [](const std::string& name, nn::Module& module, const MeshPtr& mesh) {
                for (auto& slot : module.own_parameters()) {
                  nn::Module::set_parameter(slot, distribute_tensor(slot.parameter.detach().set_requires_grad(true),
                                                                    mesh, {Shard(name == "up" ? 0 : 1)}));
                }
              },
          .input_fn = [](nn::Module&, nn::TensorRefs& inputs,
                         const MeshPtr& mesh) { *inputs[0] = from_local(*inputs[0], mesh, {Replicate()}); },
          .output_fn = [](nn::Module&, nn::TensorRefs& outputs,
                          const MeshPtr&) { *outputs[0] = full_tensor(*outputs[0]); }};
}

TEST(DistributeModule, PartitionsAndReplicatesParametersAndCallsInputAndOutputFn) {
  on_two_ranks([](const MeshPtr& mesh) {
    Net plain(1);
    Net net(mesh->rank() + 1.0);  // the first rank's values are used
    distribute_module(net, mesh, tensor_parallel());
    EXPECT_EQ(placements(net.up->weight)[0], Shard(0));
    EXPECT_EQ(placements(net.down->weight)[0], Shard(1));
    EXPECT_EQ(placements(net.scale)[0], Replicate());
    const at::Tensor x = here(at::arange(12, at::kFloat)).view({3, 4});
    const at::Tensor y = net(x);
    EXPECT_FALSE(is_dtensor(y));
    EXPECT_TRUE(at::allclose(y, plain(x)));
    y.sum().backward();
    plain(x).sum().backward();
    EXPECT_TRUE(at::allclose(full_tensor(net.up->weight.grad()), plain.up->weight.grad()));
    EXPECT_EQ(placements(net.up->weight.grad())[0], Shard(0));
    try {
      distribute_module(net, mesh);
      ADD_FAILURE() << "a second call must fail";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(),
                  ::testing::HasSubstr("distribute_module should only be called once on a module, but it has "
                                       "already been called on this module!"));
    }
  });
}

TEST(DistributeModule, WithoutPartitionFnReplicatesAllAndKeepsRequiresGrad) {
  on_two_ranks([](const MeshPtr& mesh) {
    Net net(mesh->rank() + 1.0);
    net.down->weight.set_requires_grad(false);
    distribute_module(net, mesh);
    EXPECT_EQ(placements(net.up->weight)[0], Replicate());
    EXPECT_TRUE(net.up->weight.requires_grad());
    EXPECT_FALSE(net.down->weight.requires_grad());
    EXPECT_TRUE(at::equal(to_local(net.up->weight.detach()), here(at::ones({8, 4}))));
    EXPECT_EQ(net.parameters().size(), 2);
    EXPECT_TRUE(is_dtensor(net.parameters()[0]));
  });
}

struct Move : nn::Callable<Move> {
  Placements to;
  explicit Move(Placements wanted) : to(std::move(wanted)) {}
  at::Tensor forward(const at::Tensor& x) { return redistribute(x, to); }
};

// Sharding (`cut`) needs an all-gather in backward. Gathering (`gather`) needs an all-gather in forward.
struct Mover : nn::Callable<Mover> {
  std::shared_ptr<Move> cut = register_module("cut", std::make_shared<Move>(Placements{Shard(0)}));
  std::shared_ptr<Move> gather = register_module("gather", std::make_shared<Move>(Placements{Replicate()}));
  at::Tensor forward(const at::Tensor& x) { return (*gather)((*cut)(x)); }
};

TEST(ModuleTrace, AttributesCollectivesToModulesInForwardAndBackward) {
  on_two_ranks([](const MeshPtr& mesh) {
    Mover mover;
    const at::Tensor x = distribute_tensor(here(at::ones({4, 2})).set_requires_grad(true), mesh, {Replicate()}) * 2;
    CommDebugMode comm;
    {
      ModuleTrace trace(mover);
      mover(x).sum().backward();
    }
    full_tensor(mover(x));
    EXPECT_EQ(comm.total(), 3) << "the last call is nobody's\n" << comm.table();
    std::map<std::string, int64_t> gathers;
    for (const auto& [name, tally] : comm.by_module()) {
      gathers[name] = tally.counts[static_cast<int>(CommKind::kAllGather)];
      EXPECT_EQ(tally.total_bytes(), 16) << name;
    }
    const std::map<std::string, int64_t> wanted = {
        {"model", 1}, {"model.gather", 1}, {"model (backward)", 1}, {"model.cut (backward)", 1}};
    EXPECT_EQ(gathers, wanted) << comm.table();
    EXPECT_THAT(comm.table(),
                ::testing::HasSubstr("model.gather: 1 collectives, 16 bytes\n  all_gather: 1, 16 bytes\n"));
  });
}

}  // namespace
}  // namespace tessera
