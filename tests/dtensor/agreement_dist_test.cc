// Tests that all ranks agree where one rank alone could decide otherwise: errors that depend on values, undefined
// gradients that count as zeros, and the destruction of meshes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/dtensor/dispatch/rule.h"
#include "tests/dtensor/support.h"

namespace tessera {
namespace {

using testing::on_ranks;

// Returns whether `body` throws. All ranks then communicate once more; a rank that threw alone would leave the others
// waiting in an earlier collective.
bool fails_everywhere(const MeshPtr& mesh, const std::function<void()>& body) {
  bool failed = false;
  try {
    body();
  } catch (const std::exception&) {
    failed = true;
  }
  const at::Tensor count = from_local(at::full({1}, failed ? 1.0 : 0.0), mesh, Placements(mesh->ndim(), Partial()));
  const auto ranks = full_tensor(count).item<double>();
  EXPECT_EQ(ranks, failed ? static_cast<double>(mesh->size()) : 0.0);
  return failed;
}

TEST(Agreement, ErrorsOfLinalgKernelsAreRaisedOnAllRanks) {
  on_ranks(4, {2, 2}, [](const MeshPtr& mesh) {
    at::Tensor batch = at::eye(3).expand({8, 3, 3}).clone();
    const auto spread = [&] { return distribute_tensor(batch, mesh, {Shard(0), Shard(0)}); };
    EXPECT_FALSE(fails_everywhere(mesh, [&] { at::cholesky(spread()); }));
    batch[5][1][1] = -1;  // an element of one rank's shard
    EXPECT_TRUE(fails_everywhere(mesh, [&] { at::cholesky(spread()); }));
    batch[5][1][1] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_TRUE(fails_everywhere(mesh, [&] { at::linalg_eig(spread()); }));
    EXPECT_TRUE(fails_everywhere(mesh, [&] { at::linalg_svd(spread()); }));
  });
}

TEST(Agreement, PlainGradientThatIsZeroOnSomeRanksOnlyIsRefused) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Replicate()}).requires_grad_(true);
    const auto backward = [&](double value) { return [&x, value] { (x * x).backward(at::full({4}, value)); }; };
    EXPECT_TRUE(fails_everywhere(mesh, backward(mesh->rank())));
    EXPECT_FALSE(fails_everywhere(mesh, backward(0)));
  });
}

TEST(Agreement, ScatterWithAnEmptyIndexWritesNothing) {
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const at::Tensor plain = at::arange(12.).view({4, 3});
    const at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)});
    const at::Tensor none = distribute_tensor(at::empty({0}, at::kLong), mesh, {Replicate()});
    EXPECT_TRUE(full_tensor(x.scatter(1, none, 5.0)).equal(plain));
    EXPECT_TRUE(
        full_tensor(x.scatter_add(0, none, distribute_tensor(at::empty({0}), mesh, {Replicate()}))).equal(plain));
  });
}

TEST(Agreement, PendingTensorMayOutliveItsMesh) {
  comm::run_thread_ranks(4, [](const std::shared_ptr<comm::World>& world) {
    at::Tensor pending;
    {
      const auto mesh = init_device_mesh(world, "cpu", {2, 2});
      const at::Tensor x = distribute_tensor(at::arange(64.).view({8, 8}), mesh, {Shard(0), Replicate()});
      pending = redistribute(x, {Replicate(), Replicate()}, {.async_op = true});
    }
    pending = at::Tensor();  // this result waits for its collective on a group that is destroyed with the mesh
  });
}

TEST(Agreement, ARuleMayRunOperationsOnDTensors) {
  static const auto library = [] {
    auto made =
        std::make_unique<torch::Library>(torch::Library::FRAGMENT, "tessera_rule", std::nullopt, __FILE__, __LINE__);
    made->def("twice(Tensor x) -> Tensor");
    made->impl("twice",
               torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, [](const at::Tensor& x) { return x + x; }));
    return made;
  }();
  (void)library;
  register_rule("tessera_rule::twice", [](const OpCall& call, Proposal& proposal) {
    at::relu(*call.inputs[0].tensor);  // a call with another shape of plan key
    proposal.strategies.push_back({{Shard(0)}, {Shard(0)}});
    proposal.output(call.inputs[0].sizes);
  });
  on_ranks(2, {2}, [](const MeshPtr& mesh) {
    const auto op = c10::Dispatcher::singleton()
                        .findSchemaOrThrow("tessera_rule::twice", "")
                        .typed<at::Tensor(const at::Tensor&)>();
    for (const int64_t rows : {4, 6, 4, 6}) {
      const at::Tensor plain = at::arange(rows, at::kFloat) - 2;
      const at::Tensor x = distribute_tensor(plain, mesh, {Shard(0)});
      EXPECT_TRUE(full_tensor(op.call(x)).equal(plain * 2));
      EXPECT_TRUE(full_tensor(at::relu(x)).equal(at::relu(plain)));
    }
  });
}

}  // namespace
}  // namespace tessera
