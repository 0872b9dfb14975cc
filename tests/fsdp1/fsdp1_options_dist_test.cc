// Tests the options of wrap_fsdp1 against plain models: mixed precision, hybrid sharding, offloading, parameters from
// the meta device. Tests summon_full_params.
#include <gmock/gmock.h>

#include <map>

#include "tessera/base/error.h"
#include "tessera/optim/optimizer.h"
#include "tests/fsdp1/fsdp1_model.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using Dtype = std::optional<c10::ScalarType>;

constexpr ShardingStrategy kStrategies[] = {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
                                            ShardingStrategy::kNoShard};

std::unique_ptr<optim::Optimizer> adam(nn::Module& module) {
  return optim::make_adamw(module, {.lr = 1e-2, .weight_decay = 0});
}

// ---- mixed precision ----

// Casts the parameters of the module; tied parameters stay tied.
void cast_parameters(nn::Module& module, c10::ScalarType dtype) {
  std::map<const c10::TensorImpl*, at::Tensor> cast;
  std::vector<at::Tensor> alive;
  for (const auto& named : module.named_parameters(/*all=*/true)) {
    alive.push_back(named.slot->parameter);
    auto& value = cast[alive.back().unsafeGetTensorImpl()];
    if (!value.defined()) value = alive.back().detach().to(dtype, false, /*copy=*/true).set_requires_grad(true);
    nn::Module::set_parameter(*named.slot, value);
  }
}

// Returns the mean over ranks of a plain model's gradients in `dtype` of each rank's rows; each gradient is converted
// to `reduce` first.
NamedTensors mean_of_narrow_grads(int size, c10::ScalarType dtype, c10::ScalarType reduce) {
  NamedTensors mean;
  for (int rank = 0; rank < size; ++rank) {
    SmallModel plain;
    cast_parameters(plain, dtype);
    backward(plain, rows_of_rank(tokens_of(0), rank, size), 12 / size);
    for (const auto& [name, grad] : plain_grads(plain)) {
      const auto share = grad.to(reduce).to(at::kFloat) / size;
      mean[name] = rank == 0 ? share : mean[name] + share;
    }
  }
  return mean;
}

TEST(Fsdp1MixedPrecision, ComputesInParamDtypeAndReducesInReduceDtype) {
  struct Case {
    Dtype param, reduce;
    c10::ScalarType compute, sum;
    double tolerance;
  };
  const Case cases[] = {{at::kBFloat16, at::kFloat, at::kBFloat16, at::kFloat, 1e-6},
                        {at::kBFloat16, {}, at::kBFloat16, at::kBFloat16, 1e-2},
                        {{}, at::kBFloat16, at::kFloat, at::kBFloat16, 1e-2},
                        {at::kHalf, at::kFloat, at::kHalf, at::kFloat, 1e-6}};
  on_threads(2, [&](const WorldPtr& world) {
    for (const auto& [param, reduce, compute, sum, tolerance] : cases) {
      const auto expected = mean_of_narrow_grads(2, compute, sum);
      for (const auto strategy : kStrategies) {
        for (const bool use_orig_params : {false, true}) {
          SCOPED_TRACE(::testing::Message()
                       << toString(compute) << toString(sum) << static_cast<int>(strategy) << use_orig_params);
          SmallModel model;
          wrap(model, {group_of(world), strategy, use_orig_params, {.param_dtype = param, .reduce_dtype = reduce}});
          c10::ScalarType seen{};
          model.layers[1]->register_forward_pre_hook(
              [&](nn::Module&, nn::TensorRefs&) { seen = model.layers[1]->up.scalar_type(); });
          mean_backward(model, *world, 0);
          EXPECT_EQ(seen, compute);
          EXPECT_LT(distance(whole_grads(model), expected), tolerance);
          EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
          for (const auto& parameter : model.parameters()) {
            EXPECT_EQ(parameter.scalar_type(), at::kFloat);
            const at::Tensor& grad = parameter.grad();
            EXPECT_TRUE(!grad.defined() || grad.scalar_type() == at::kFloat);
          }
        }
      }
    }
  });
}

// With float64 as compute dtype the casts do not round. The steps must equal those of a plain model whose forward runs
// in float64.
TEST(Fsdp1MixedPrecision, TrainsTheFullPrecisionShards) {
  on_threads(3, [](const WorldPtr& world) {
    for (const auto strategy : kStrategies) {
      for (const bool use_orig_params : {false, true}) {
        SmallModel plain, model;
        wrap(model, {group_of(world), strategy, use_orig_params, {.param_dtype = at::kDouble}});
        const auto plain_optimizer = optim::make_sgd(plain, {.lr = 0.1}),
                   optimizer = optim::make_sgd(model, {.lr = 0.1});
        for (int step = 0; step < 3; ++step) {
          plain_backward(plain, step);
          mean_backward(model, *world, step);
          mean_backward(model, *world, step);  // gradients accumulate
          for (const auto& parameter : model.parameters()) {
            if (parameter.grad().defined()) parameter.grad().mul_(0.5);
          }
          plain_optimizer->step();
          optimizer->step();
          plain_optimizer->zero_grad();
          optimizer->zero_grad();
        }
        EXPECT_LT(distance(whole_values(model), plain_values(plain)), 1e-5) << static_cast<int>(strategy);
      }
    }
  });
}

TEST(Fsdp1MixedPrecision, KeepLowPrecisionGradsKeepsTheGradientDtype) {
  on_threads(2, [](const WorldPtr& world) {
    for (const auto strategy : kStrategies) {
      for (const bool use_orig_params : {false, true}) {
        SmallModel model, other;
        const MixedPrecision mixed{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
        auto keeping = mixed;
        keeping.keep_low_precision_grads = true;
        wrap(model, {group_of(world), strategy, use_orig_params, keeping});
        wrap(other, {group_of(world), strategy, use_orig_params, mixed});
        const bool sharded = strategy != ShardingStrategy::kNoShard;
        for (int step = 0; step < 2; ++step) {  // the second backward accumulates
          mean_backward(model, *world, step);
          mean_backward(other, *world, step);
        }
        const auto kept = model.parameters(), full = other.parameters();
        for (size_t i = 0; i < kept.size(); ++i) {
          ASSERT_EQ(kept[i].grad().defined(), full[i].grad().defined());
          if (!kept[i].grad().defined()) continue;
          EXPECT_EQ(kept[i].grad().scalar_type(), sharded ? at::kBFloat16 : at::kFloat);
          EXPECT_LT(distance({kept[i].grad()}, {full[i].grad()}), 1e-2);
        }
      }
    }
  });
}

struct DtypeProbe : nn::Callable<DtypeProbe> {
  at::Tensor weight, mean, count;
  std::shared_ptr<DtypeProbe> inner;
  c10::ScalarType input{}, buffer{};
  explicit DtypeProbe(bool with_inner) {
    register_parameter("weight", weight, here(at::ones({4})));
    register_buffer("mean", mean, here(at::full({2}, 1.0 / 3)), /*persistent=*/true);
    register_buffer("count", count, here(at::ones({1}, at::kLong)), /*persistent=*/true);
    if (with_inner) inner = register_module("inner", std::make_shared<DtypeProbe>(false));
  }
  at::Tensor forward(const at::Tensor& x) {
    input = x.scalar_type();
    buffer = mean.scalar_type();
    const auto y = x * weight;
    return inner ? (*inner)(y.to(at::kFloat)) : y;
  }
};

TEST(Fsdp1MixedPrecision, CastsForwardInputsAndBuffers) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool inner_casts : {false, true}) {
      for (const bool root_casts : {false, true}) {
        DtypeProbe model(true);
        MixedPrecision mixed{.param_dtype = at::kBFloat16, .buffer_dtype = at::kHalf};
        mixed.cast_forward_inputs = inner_casts;
        wrap_fsdp1(*model.inner, {.group = group_of(world), .mixed_precision = mixed});
        mixed.cast_forward_inputs = false;
        mixed.cast_root_forward_inputs = root_casts;
        mixed.buffer_dtype = at::kBFloat16;
        wrap_fsdp1(model, {.group = group_of(world), .mixed_precision = mixed});
        EXPECT_EQ(model.mean.scalar_type(), at::kFloat);
        model(here(at::ones({4}))).sum().backward();
        EXPECT_EQ(model.input, root_casts ? at::kBFloat16 : at::kFloat);
        EXPECT_EQ(model.inner->input, inner_casts ? at::kBFloat16 : at::kFloat);
        EXPECT_EQ(model.buffer, at::kBFloat16);
        EXPECT_EQ(model.inner->buffer, at::kHalf);  // the inner unit's setting
        EXPECT_EQ(model.count.scalar_type(), at::kLong);
        EXPECT_EQ(saved_buffer_dtype(model, model.mean), at::kFloat);
        EXPECT_EQ(saved_buffer_dtype(model, model.inner->mean), at::kFloat);
        EXPECT_EQ(saved_buffer_dtype(model, model.count), at::kLong);
      }
    }
  });
}

// ---- hybrid sharding ----

TEST(Fsdp1HybridShard, MatchesSingleRankTraining) {
  on_threads(4, [](const WorldPtr& world) {
    const auto two_by_two = init_device_mesh(world, test_device_type(), {2, 2}, {"replicate", "shard"});
    const auto one_by_four = init_device_mesh(world, test_device_type(), {4, 1}, {"replicate", "shard"});
    for (const auto& mesh : {two_by_two, one_by_four}) {
      for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
        for (const bool use_orig_params : {false, true}) {
          SmallModel plain(3, at::kDouble), model(3, at::kDouble);
          const auto group = mesh->group("shard"), replicas = mesh->group("replicate");
          wrap(model, {.group = group,
                       .sharding_strategy = strategy,
                       .use_orig_params = use_orig_params,
                       .replicate_group = replicas});
          const auto handle = flat_parameter_handles(model)[0];
          const bool sharded = group->size() > 1;
          EXPECT_EQ(handle->sharding_strategy(), sharded ? strategy : ShardingStrategy::kNoShard);
          EXPECT_EQ(handle->group()->size(), group->size());
          const auto plain_optimizer = adam(plain), optimizer = adam(model);
          for (int step = 0; step < 2; ++step) {
            plain_backward(plain, step);
            mean_backward(model, *world, step);
            ASSERT_LT(distance(whole_grads(model), plain_grads(plain)), 1e-10);
            plain_optimizer->step();
            optimizer->step();
            plain_optimizer->zero_grad();
            optimizer->zero_grad();
          }
          EXPECT_LT(distance(whole_values(model), plain_values(plain)), 1e-10);
        }
      }
    }
    SmallModel model;
    const auto group = two_by_two->group("shard"), replicas = two_by_two->group("replicate");
    EXPECT_THAT(
        error_of([&] { wrap_fsdp1(model, {.group = group, .sharding_strategy = ShardingStrategy::kHybridShard}); }),
        HasSubstr("HYBRID_SHARD: found no replicate_group"));
    EXPECT_THAT(error_of([&] { wrap_fsdp1(model, {.group = group, .replicate_group = replicas}); }),
                HasSubstr("FULL_SHARD: found a replicate_group"));
    EXPECT_THAT(error_of([&] { wrap_fsdp1(model, {.group = group, .mixed_precision = {.reduce_dtype = at::kLong}}); }),
                HasSubstr("reduce_dtype: found Long, wanted a floating dtype"));
  });
}

TEST(Fsdp1HybridShard, AllGatherCountsFollowTheShardingStrategy) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"replicate", "shard"});
    for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
      SmallModel model(6);
      wrap(model,
           {.group = mesh->group("shard"), .sharding_strategy = strategy, .replicate_group = mesh->group("replicate")});
      mean_backward(model, *world, 0);
      EXPECT_EQ(fsdp_stats(model).all_gathers, strategy == ShardingStrategy::kHybridShard ? 6 + 6 + 1 : 6 + 1);
      EXPECT_EQ(fsdp_stats(model).unsharded_groups, 0);
    }
  });
}

// ---- offloading ----

TEST(Fsdp1CpuOffload, WarnsOnceAndHasNoEffectOnCpuModels) {
  TESSERA_CPU_ONLY("is about a model on the CPU");
  ::testing::internal::CaptureStderr();
  on_threads(2, [](const WorldPtr& world) {
    SmallModel plain, model;
    wrap(model, {.group = group_of(world), .cpu_offload = {.offload_params = true}});
    plain_backward(plain, 0);
    mean_backward(model, *world, 0);
    EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
  });
  const auto said = ::testing::internal::GetCapturedStderr();
  const auto first = said.find("cpu_offload");
  EXPECT_NE(first, std::string::npos) << said;
  EXPECT_EQ(said.find("cpu_offload", first + 1), std::string::npos) << said;
}

// ---- parameters from the meta device ----

// The values depend on the slot's name and shape; tied parameters stay tied.
struct FromMeta {
  std::map<const c10::TensorImpl*, at::Tensor> made;
  std::vector<at::Tensor> alive;
  int calls = 0;
  void operator()(nn::Module& module) {
    ++calls;
    for (auto& slot : module.own_parameters()) {
      const at::Tensor before = slot.parameter;
      alive.push_back(before);
      auto& value = made[before.unsafeGetTensorImpl()];
      if (!value.defined()) {
        value = (here(at::arange(before.numel(), at::kDouble)) + static_cast<double>(slot.name.size()))
                    .sin()
                    .view(before.sizes());
        value = (value * 0.3).set_requires_grad(true);
      }
      nn::Module::set_parameter(slot, value);
    }
  }
};

TEST(Fsdp1MetaDevice, InitializesParametersUnitByUnit) {
  on_threads(3, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      const at::TensorOptions meta = at::TensorOptions(at::kDouble).device(at::kMeta);
      SmallModel plain(3, meta), model(3, meta);
      FromMeta of_plain, of_model;
      for (const auto& [path, module] : plain.named_modules()) of_plain(*module);
      wrap(model, {.group = group_of(world),
                   .use_orig_params = use_orig_params,
                   .param_init_fn = [&](nn::Module& module) { of_model(module); }});
      EXPECT_EQ(of_model.calls, 4);
      EXPECT_LT(distance(whole_values(model), plain_values(plain)), 1e-15);
      plain_backward(plain, 0);
      mean_backward(model, *world, 0);
      EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), 1e-10);

      const auto error_with = [&](const std::function<void(nn::Module&)>& make) {
        SmallModel other(1, meta);
        return error_of([&] { wrap_fsdp1(other, {.group = group_of(world), .param_init_fn = make}); });
      };
      EXPECT_THAT(error_with([](nn::Module&) {}), HasSubstr("param_init_fn left this parameter on the meta device"));
      EXPECT_THAT(error_with([](nn::Module& module) {
                    for (auto& slot : module.own_parameters()) {
                      nn::Module::set_parameter(slot, here(at::zeros(slot.parameter.sizes())).set_requires_grad(true));
                    }
                  }),
                  HasSubstr("embedding and head: one shared tensor before param_init_fn, two tensors after it"));
      EXPECT_THAT(error_with({}), HasSubstr("still on the meta device. Set param_init_fn"));
    }
  });
}

// ---- summon_full_params ----

std::vector<std::string> names_of(nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& named : module.named_parameters(/*all=*/true)) names.push_back(named.name);
  return names;
}

TEST(Fsdp1SummonFullParams, YieldsFullParametersAndWritesThemBack) {
  on_threads(3, [](const WorldPtr& world) {
    for (const auto strategy : kStrategies) {
      for (const bool use_orig_params : {false, true}) {
        SCOPED_TRACE(::testing::Message() << static_cast<int>(strategy) << use_orig_params);
        SmallModel plain, model;
        wrap(model, {group_of(world), strategy, use_orig_params, {.param_dtype = at::kBFloat16}});
        const auto before = names_of(model);
        const auto leaves = model.parameters();
        const auto change = [](nn::Module& of) {
          const at::NoGradGuard no_grad;
          for (const auto& parameter : of.parameters()) parameter.mul_(2).add_(0.25);
        };
        for (const bool writeback : {false, true}) {
          summon_full_params(model, {.writeback = writeback}, [&] {
            EXPECT_EQ(names_of(model), names_of(plain));
            EXPECT_EQ(distance(plain_values(model), plain_values(plain)), 0);
            EXPECT_TRUE(model.layers[1]->up.is_same(model.layers[1]->parameters()[1]));
            EXPECT_TRUE(model.head.is_same(model.embedding));
            for (const auto& parameter : model.parameters()) EXPECT_TRUE(parameter.requires_grad());
            change(model);
          });
          EXPECT_EQ(names_of(model), before);
          for (size_t i = 0; i < leaves.size(); ++i) EXPECT_TRUE(model.parameters()[i].is_same(leaves[i]));
          if (writeback) change(plain);
          EXPECT_EQ(distance(whole_values(model), plain_values(plain)), 0);
        }
        const auto logits = model(tokens_of(0)).to(at::kFloat);
        EXPECT_LT(
            (logits - plain(tokens_of(0))).abs().max().item<double>() / plain(tokens_of(0)).abs().max().item<double>(),
            0.1);  // forward reads the written values
      }
    }
  });
}

TEST(Fsdp1SummonFullParams, SupportsGradientsRecurseAndRank0Only) {
  on_threads(3, [](const WorldPtr& world) {
    for (const auto strategy : kStrategies) {
      SmallModel plain, model;
      wrap(model, {group_of(world), strategy, true});
      plain_backward(plain, 0);
      mean_backward(model, *world, 0);
      model.layers[0]->parameters()[2].mutable_grad().reset();
      plain.layers[0]->parameters()[2].mutable_grad().reset();
      summon_full_params(model, {.with_grads = true}, [&] {
        EXPECT_LT(distance(plain_grads(model), plain_grads(plain)), kTolerance);
        EXPECT_FALSE(model.layers[0]->parameters()[2].grad().defined());
        for (auto* each : {&plain, &model}) {
          const at::NoGradGuard no_grad;
          for (const auto& parameter : each->parameters()) {
            if (parameter.grad().defined()) parameter.grad().mul_(-3);
          }
        }
      });
      EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
    }
    for (const bool use_orig_params : {false, true}) {
      SmallModel plain, model;
      wrap(model, {.group = group_of(world), .use_orig_params = use_orig_params});
      const auto sharded = names_of(model);
      summon_full_params(model, {.writeback = false, .rank0_only = true, .offload_to_cpu = true}, [&] {
        EXPECT_EQ(names_of(model), world->rank() == 0 ? names_of(plain) : sharded);
        EXPECT_TRUE(world->rank() != 0 || distance(plain_values(model), plain_values(plain)) == 0);
      });
      summon_full_params(model, {.recurse = false}, [&] {
        EXPECT_EQ(model.embedding.sizes(), plain.embedding.sizes());
        EXPECT_EQ(names_of(*model.layers[0]).size(), use_orig_params ? 4u : 1u);
        EXPECT_TRUE(!use_orig_params || model.layers[0]->parameters()[1].dim() == 1);
      });
      EXPECT_EQ(names_of(model), sharded);
    }
  });
}

TEST(Fsdp1SummonFullParams, RefusesUnsupportedUseAndAlwaysRestoresTheShards) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      SmallModel model, unsharded;
      wrap(model, {.group = group_of(world), .use_orig_params = use_orig_params});
      wrap(unsharded, {group_of(world), ShardingStrategy::kNoShard, use_orig_params});
      const auto sharded = names_of(model);
      const auto before = whole_values(model);
      const auto nothing = [] {};
      EXPECT_THAT(error_of([&] { summon_full_params(model, {.rank0_only = true}, nothing); }),
                  HasSubstr("writeback=True and rank0_only=True is not supported"));
      EXPECT_THAT(error_of([&] { summon_full_params(unsharded, {.offload_to_cpu = true}, nothing); }),
                  HasSubstr("offload_to_cpu=True and NO_SHARD is not supported"));
      EXPECT_THAT(error_of([&] {
                    summon_full_params(model, {.offload_to_cpu = use_orig_params, .with_grads = true}, nothing);
                  }),
                  HasSubstr("with_grads=True, use_orig_params="));
      EXPECT_THAT(error_of([&] { summon_full_params(model, {}, [&] { model(tokens_of(0)); }); }),
                  HasSubstr("a forward or backward pass ran inside summon_full_params"));
      EXPECT_THAT(error_of([&] { summon_full_params(model, {}, [&] { summon_full_params(model, {}, nothing); }); }),
                  HasSubstr("summoned already"));
      EXPECT_THAT(error_of([&] {
                    summon_full_params(model, {}, [&] {
                      nn::Module::set_parameter(model.layers[1]->own_parameters()[1], here(at::ones({3})));
                    });
                  }),
                  HasSubstr("'up' was replaced by a tensor of shape [3], wanted [10, 6]"));
      EXPECT_EQ(names_of(model), sharded);
      EXPECT_EQ(distance(whole_values(model), before), 0);
      // Values that were written before an exception are written back to the shards.
      EXPECT_THAT(error_of([&] {
                    summon_full_params(model, {}, [&] {
                      const at::NoGradGuard no_grad;
                      model.layers[0]->bias.fill_(7);
                      throw std::runtime_error("of the body");
                    });
                  }),
                  HasSubstr("of the body"));
      EXPECT_EQ(names_of(model), sharded);
      EXPECT_TRUE(whole_values(model).at("layers.0.bias").eq(7).all().item<bool>());
      SmallModel plain;
      {
        const at::NoGradGuard no_grad;
        plain.layers[0]->bias.fill_(7);
      }
      plain_backward(plain, 0);
      mean_backward(model, *world, 0);
      EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
