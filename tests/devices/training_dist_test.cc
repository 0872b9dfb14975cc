// Tests collectives and sharded training on the pretend device against the same ranks on the CPU.
#include <c10/core/StreamGuard.h>

#include <cmath>
#include <thread>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/kernels/loss/linear_cross_entropy.h"
#include "tessera/nn/attention/context_parallel_guard.h"
#include "tessera/optim/found_inf.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/context_parallel/context_parallel.h"
#include "tessera/parallel/ddp/replicate.h"
#include "tessera/parallel/experts/expert_parallel.h"
#include "tests/devices/pretend.h"
#include "tests/parallel/small_model.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

MeshPtr line_of(const WorldPtr& world, const std::string& device) {
  return init_device_mesh(world, device, {world->size()}, {"dp"});
}

void on_each_size(const RankBody& body) {
  pretend::take_faults();
  for (const int size : {1, 2, 4}) on_threads(size, body);
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
}

TEST(PretendCollectives, EqualTheCpu) {
  on_each_size([](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    const int size = world->size(), rank = world->rank();
    ASSERT_EQ(mesh->device(), pretend_device(rank));
    comm::Group& group = *mesh->group(0);
    const at::Tensor own = at::arange(4 * size, at::kFloat) + rank, there = own.to(mesh->device());
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      at::Tensor sum = own.to(type, false, /*copy=*/true), other = there.to(type, false, /*copy=*/true);
      comm::all_reduce(group, sum, comm::ReduceOp::kAvg).wait();
      comm::all_reduce(group, other, comm::ReduceOp::kAvg).wait();
      EXPECT_TRUE(at::equal(sum, other.cpu()));
      at::Tensor part = at::empty({4}, type), part_there = at::empty({4}, other.options());
      comm::reduce_scatter_into(group, part, sum).wait();
      comm::reduce_scatter_into(group, part_there, other).wait();
      EXPECT_TRUE(at::equal(part, part_there.cpu()));
    }
    at::Tensor all = at::empty({size, 4 * size}, there.options()), turned = at::empty_like(there);
    comm::all_gather_into(group, all, there).wait();
    EXPECT_TRUE(at::equal(all.cpu(), at::arange(4 * size, at::kFloat) + at::arange(size, at::kFloat).view({size, 1})));
    comm::all_to_all_single(group, turned, there, {}, {}).wait();
    EXPECT_EQ(turned.cpu()[4 * (size - 1)].item<float>(), static_cast<float>(4 * rank + size - 1));
    comm::broadcast(group, turned, size - 1).wait();
    EXPECT_EQ(turned.cpu()[0].item<float>(), static_cast<float>(4 * (size - 1)));
    comm::barrier(group);
  });
}

TEST(PretendCollectives, AreOrderedByWaitOnly) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    at::Tensor sum = at::ones({5}, at::TensorOptions().device(mesh->device()));
    auto pending = comm::all_reduce(*mesh->group(0), sum);
    EXPECT_THAT(error_of([&] { sum + 1; }), HasSubstr("nothing orders the two"));
    pending.wait();
    EXPECT_EQ((sum + 1).sum().item<float>(), 15);
  });
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
}

TEST(PretendMesh, ErrorNamesTheKnownDevices) {
  const auto world = comm::World::single();
  EXPECT_THAT(error_of([&] { init_device_mesh(world, "rocket", {1}); }), HasSubstr("wanted cpu, cuda or pretend"));
  EXPECT_EQ(init_device_mesh(world, "pretend", {1})->device(), pretend_device(0));
}

struct Trained {
  std::vector<at::Tensor> parameters;
  std::vector<double> norms, losses;
};

enum class Kind { kSharded, kReplicated, kHybrid, kOffloaded };

Trained train(const WorldPtr& world, Kind kind, const std::string& device, const MixedPrecisionPolicy& policy) {
  const auto mesh = kind == Kind::kHybrid
                        ? init_device_mesh(world, device, {2, world->size() / 2}, {"replicate", "shard"})
                        : line_of(world, device);
  SmallModel model;
  if (kind == Kind::kReplicated) {
    std::map<const c10::TensorImpl*, at::Tensor> there;  // tied parameters stay tied
    for (const auto& named : model.named_parameters(true)) {
      at::Tensor& moved = there[named.slot->parameter.unsafeGetTensorImpl()];
      if (!moved.defined()) moved = named.slot->parameter.detach().to(mesh->device()).set_requires_grad(true);
      nn::Module::set_parameter(*named.slot, moved);
    }
    replicate(model, {.mesh = mesh, .mp_policy = policy});
  } else {
    shard(model, {.mesh = mesh, .mp_policy = policy, .cpu_offload = kind == Kind::kOffloaded});
  }
  const auto optimizer = optim::make_adamw(model, {.lr = 1e-2});
  Trained out;
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      const auto rows = rows_of_rank(tokens_of(2 * step + micro), world->rank(), world->size()).to(mesh->device());
      const at::Tensor loss = loss_sum(model(rows), rows) / 48.0;
      set_requires_gradient_sync(model, micro == 1);
      loss.backward();
      out.losses.push_back(loss.item<double>());
    }
    out.norms.push_back(optim::clip_grad_norm(model.parameters(), 0.5));
    optimizer->step();
    optimizer->zero_grad();
  }
  for (auto& each : whole_parameters(model)) out.parameters.push_back(each.cpu());
  return out;
}

// In half precision, kernels that round in other places give other last digits. AdamW may turn these into differences
// as large as an update.
void expect_as_on_cpu(const WorldPtr& world, Kind kind, const MixedPrecisionPolicy& policy = {}) {
  const double tolerance = policy.param_dtype ? 1e-2 : 1e-5;
  const Trained wanted = train(world, kind, "cpu", policy), found = train(world, kind, "pretend", policy);
  EXPECT_LT(distance(found.parameters, wanted.parameters), 3 * tolerance);
  for (size_t i = 0; i < wanted.norms.size(); ++i) {
    EXPECT_NEAR(found.norms[i], wanted.norms[i], tolerance * wanted.norms[i]);
  }
  for (size_t i = 0; i < wanted.losses.size(); ++i) EXPECT_NEAR(found.losses[i], wanted.losses[i], tolerance);
}

TEST(PretendTraining, FullyShardedEqualsTheCpu) {
  on_each_size([](const WorldPtr& world) { expect_as_on_cpu(world, Kind::kSharded); });
}

TEST(PretendTraining, FullyShardedInHalfPrecisionEqualsTheCpu) {
  on_each_size([](const WorldPtr& world) {
    expect_as_on_cpu(world, Kind::kSharded, {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  });
}

TEST(PretendTraining, HybridShardedEqualsTheCpu) {
  on_threads(4, [](const WorldPtr& world) { expect_as_on_cpu(world, Kind::kHybrid); });
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
}

TEST(PretendTraining, ReplicatedEqualsTheCpu) {
  on_each_size([](const WorldPtr& world) { expect_as_on_cpu(world, Kind::kReplicated); });
}

TEST(PretendTraining, OffloadedToTheHostEqualsTheCpu) {
  on_each_size([](const WorldPtr& world) {
    expect_as_on_cpu(world, Kind::kOffloaded);
    expect_as_on_cpu(world, Kind::kOffloaded, {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat});
  });
}

// Each group has one copy per direction, none of pageable memory. Parameters and optimizer state are on the host
// between steps.
TEST(PretendTraining, OffloadKeepsShardsGradientsAndOptimizerStateInPinnedHostMemory) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    SmallModel model;
    shard(model, {.mesh = mesh, .cpu_offload = true});
    const auto optimizer = optim::make_adamw(model, {.lr = 1e-2});
    const auto rows = rows_of_rank(tokens_of(0), world->rank(), world->size()).to(mesh->device());
    pretend::Counters before;
    for (int step = 0; step < 3; ++step) {
      before = pretend::counters(world->rank());
      const at::Tensor loss = loss_sum(model(rows), rows);
      EXPECT_EQ(loss.device(), mesh->device());
      loss.backward();
      for (const auto& parameter : model.parameters()) {
        EXPECT_TRUE(to_local(parameter).is_cpu() && to_local(parameter).is_pinned());
        EXPECT_TRUE(to_local(parameter.grad()).is_cpu());
      }
      optimizer->step();
      optimizer->zero_grad();
    }
    const auto cost = pretend::counters(world->rank()) - before;
    EXPECT_EQ(cost.pageable_copies, 0);
    EXPECT_EQ(cost.copies_to_device, 2 * 3 + 1);  // each layer for forward and backward, the root once
    EXPECT_EQ(cost.copies_to_host, 4);
    for (const auto& name : optimizer->parameter_names()) {
      for (const auto& [kind, state] : optimizer->state(name)) {
        EXPECT_TRUE((is_dtensor(state) ? to_local(state) : state).is_cpu()) << name << " " << kind;
      }
    }
  });
  EXPECT_THAT(pretend::take_faults(), IsEmpty());
}

TESSERA_RANKS_TEST(PretendProcesses, FullyShardedEqualsTheCpu, (2)) { expect_as_on_cpu(world, Kind::kSharded); }

TEST(PretendDTensor, ComputesAndRedistributes) {
  on_each_size([](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    const at::Tensor plain = at::arange(42, at::kFloat).view({7, 6}) / 10, there = plain.to(mesh->device());
    const at::Tensor rows = distribute_tensor(there, mesh, {Shard(0)}),
                     columns = distribute_tensor(there, mesh, {Shard(1)});
    EXPECT_EQ(rows.device(), mesh->device());
    EXPECT_TRUE(at::allclose(full_tensor(rows.t().mm(rows)).cpu(), plain.t().mm(plain)));
    EXPECT_TRUE(at::allclose(full_tensor((rows + columns).softmax(0)).cpu(), (plain + plain).softmax(0)));
    EXPECT_TRUE(at::equal(full_tensor(redistribute(columns, {Shard(0)})).cpu(), plain));
  });
}

TEST(PretendGradients, FoundInfOfOneRankReachesAllRanksWithoutHostSync) {
  on_each_size([](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    const auto there = [&](double value) { return at::full({}, value, at::device(mesh->device()).dtype(at::kDouble)); };
    const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
    for (const double value : {1e308, infinity, -infinity, nan}) {
      const auto own = there(world->rank() == world->size() - 1 ? value : 0.5), other = there(1e308);
      auto& group = *mesh->group(0);  // the host waits when a group is made
      for (const auto& numbers : {std::vector{own, other}, std::vector{other, own}}) {
        const auto before = pretend::counters(world->rank());
        const auto found = optim::found_inf(group, numbers, mesh->device());
        EXPECT_EQ((pretend::counters(world->rank()) - before).host_syncs, 0);
        EXPECT_EQ(found.device(), mesh->device());
        EXPECT_EQ(found.item<double>(), std::isfinite(value) ? 0 : 1) << value;
      }
    }
  });
}

// The cases are shards that are empty on one of four ranks, replicas, plain parameters, and two dtypes.
TEST(PretendGradients, NormAndClippingNeedNoHostSync) {
  on_each_size([](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    const auto make = [&] {
      std::vector<at::Tensor> parameters;
      const auto add = [&](const at::Tensor& value, const std::optional<Placements>& placements) {
        const auto there = value.to(mesh->device());
        auto parameter = placements ? distribute_tensor(there, mesh, *placements) : there.clone();
        parameter.set_requires_grad(true);
        parameter.mutable_grad() = parameter.detach() * 3;
        parameters.push_back(parameter);
      };
      const auto values = at::arange(15, at::kFloat).view({5, 3}) - 4;
      add(values, Placements{Shard(0)});
      add(values / 7, Placements{Replicate()});
      add(values.to(at::kBFloat16), Placements{Shard(1)});
      add(values + 2, std::nullopt);
      return parameters;
    };
    const auto host = make(), there = make();
    for (const double most : {1.0, 1e3}) {
      const double expected = optim::get_grad_norm(host);
      const auto before = pretend::counters(world->rank());
      const auto norm = optim::grad_norm_tensor(there);
      optim::clip_grad_by_total_norm_(there, most, norm);
      EXPECT_EQ((pretend::counters(world->rank()) - before).host_syncs, 0);
      EXPECT_EQ(norm.device(), mesh->device());
      EXPECT_NEAR(norm.item<double>(), expected, 1e-12 * expected);
      optim::clip_grad_by_total_norm_(host, most, expected);
      for (size_t i = 0; i < host.size(); ++i) {
        EXPECT_TRUE(at::equal(local_tensor_of(there[i].grad()).cpu(), local_tensor_of(host[i].grad()).cpu())) << i;
      }
    }
    auto wide = at::ones({2}, at::TensorOptions(at::kDouble).device(mesh->device())).set_requires_grad(true);
    wide.mutable_grad() = at::full_like(wide, 1e200).detach();
    const auto norm = optim::grad_norm_tensor({wide});
    EXPECT_TRUE(norm.is_cpu()) << "squares of float64 may leave it";
    EXPECT_NEAR(norm.item<double>(), std::sqrt(2.0) * 1e200, 1e188);
  });
}

// Each rank routes its own rows; the last rank has no rows.
TEST(PretendRouters, BalanceLossNeedsNoHostSync) {
  on_each_size([](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    const int64_t rows = world->rank() == world->size() - 1 ? 0 : 5;
    const at::Tensor probabilities =
        (at::arange(4 * rows, at::kFloat) + world->rank()).cos().view({rows, 4}).softmax(1);
    const at::Tensor chosen = std::get<1>(probabilities.topk(2, 1));
    nn::RouterStatistics host(4, 0.3), there(4, 0.3);
    const at::Tensor far = probabilities.to(mesh->device()), far_chosen = chosen.to(mesh->device());
    host.begin(), there.begin();
    host.count(probabilities, chosen, {});
    const at::Tensor expected = reduce_router_statistics(host, *world->group());
    auto& group = *mesh->group(0);  // the host waits when a group is made
    const auto before = pretend::counters(world->rank());
    there.count(far, far_chosen, {});
    const at::Tensor found = reduce_router_statistics(there, group, mesh->device());
    const at::Tensor gradient = there.gradient();
    EXPECT_EQ((pretend::counters(world->rank()) - before).host_syncs, 0);
    EXPECT_EQ(found.device(), mesh->device());
    EXPECT_NEAR(found.item<double>(), expected.item<double>(), 1e-12);
    EXPECT_TRUE(at::allclose(gradient.cpu(), host.gradient(), 1e-6, 1e-9));
    // The group's back-end does not carry the device's tensors.
    there.begin();
    there.count(far, far_chosen, {});
    EXPECT_NEAR(reduce_router_statistics(there, *world->group(), mesh->device()).item<double>(),
                expected.item<double>(), 1e-12);
  });
}

// A recomputed layer must attend as in forward, although the recomputation runs on another thread.
TEST(PretendContexts, ContextParallelIsActiveInBackwardThreads) {
  on_threads(2, [](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    at::Tensor tokens = at::arange(16, at::TensorOptions().device(mesh->device())).view({1, 16});
    at::Tensor x = at::ones({3}, at::TensorOptions().device(mesh->device())).set_requires_grad(true);
    const auto here = std::this_thread::get_id();
    const auto backward = [&] {
      bool in_force = false, elsewhere = false;
      const at::Tensor y = x * 2;
      y.register_hook([&](const at::Tensor&) {
        in_force = nn::ContextParallelGuard::current() != nullptr;
        elsewhere = std::this_thread::get_id() != here;
      });
      y.sum().backward();
      EXPECT_TRUE(elsewhere);
      return in_force;
    };
    {
      const ContextParallel scope(mesh, {.buffers = {tokens}, .buffer_seq_dims = {1}});
      EXPECT_EQ(tokens.size(1), 8);
      EXPECT_TRUE(backward());
    }
    EXPECT_EQ(tokens.size(1), 16);
    EXPECT_FALSE(backward());
  });
}

struct HeadLoss {
  at::Tensor loss, hidden_gradient, weight_gradient;
};

HeadLoss head_loss(at::Tensor hidden, at::Tensor weight, const at::Tensor& labels, double softcap) {
  hidden = hidden.detach().set_requires_grad(true);
  weight = weight.detach().set_requires_grad(true);
  const auto loss = kernels::linear_cross_entropy(hidden, weight, labels, {.chunk_bytes = 64, .softcap = softcap});
  loss.backward();
  return {loss.detach(), hidden.grad(), weight.grad()};
}

TEST(PretendLoss, LinearCrossEntropyEqualsTheCpuWithoutHostSync) {
  on_each_size([](const WorldPtr& world) {
    const auto mesh = line_of(world, "pretend");
    const at::Tensor hidden = at::arange(28, at::kFloat).sin().view({7, 4}), weight = at::arange(20).cos().view({5, 4});
    const at::Tensor labels = at::tensor(std::vector<int64_t>{3, -100, 0, 4, -100, 1, 4}),
                     none = at::full_like(labels, kIgnoredLabel);
    const at::Tensor wrong = at::tensor(std::vector<int64_t>{3, -100, 0, 5, -100, 1, 4});
    const auto there = [&](const at::Tensor& tensor, const Placement& placement) {
      return distribute_tensor(tensor.to(mesh->device()), mesh, {placement});
    };
    for (const double softcap : {0.0, 2.0}) {
      const auto expected = head_loss(hidden, weight, labels, softcap);
      // Three placements: replicated, sharded rows, sharded classes.
      for (const auto& [rows, classes] : {std::pair<Placement, Placement>{Replicate(), Replicate()},
                                          {Shard(0), Replicate()},
                                          {Replicate(), Shard(0)}}) {
        const auto h = there(hidden, rows), w = there(weight, classes), l = there(labels, rows);
        const auto before = pretend::counters(world->rank());
        const auto found = head_loss(h, w, l, softcap);
        EXPECT_EQ((pretend::counters(world->rank()) - before).host_syncs, 0);
        EXPECT_NEAR(full_tensor(found.loss).item<float>(), expected.loss.item<float>(), 1e-5);
        EXPECT_TRUE(at::allclose(full_tensor(found.hidden_gradient).cpu(), expected.hidden_gradient, 1e-5, 1e-6));
        EXPECT_TRUE(at::allclose(full_tensor(found.weight_gradient).cpu(), expected.weight_gradient, 1e-5, 1e-6));
        EXPECT_TRUE(std::isnan(full_tensor(head_loss(h, w, there(wrong, rows), softcap).loss).item<float>()));
        const auto nothing = head_loss(h, w, there(none, rows), softcap);
        EXPECT_EQ(full_tensor(nothing.loss).item<float>(), 0);
        EXPECT_EQ(full_tensor(nothing.weight_gradient).abs().max().item<float>(), 0);
      }
    }
  });
}

}  // namespace
}  // namespace tessera::testing
