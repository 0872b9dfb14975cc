// Tests the interface of the units of wrap_fsdp1: names, shards, handles, clipping, and wrong use.
#include <gmock/gmock.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/optim/optimizer.h"
#include "tests/fsdp1/fsdp1_model.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> shown_names(nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& named : module.named_parameters()) names.push_back(named.name);
  return names;
}

std::vector<std::string> handle_names(nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& handle : flat_parameter_handles(module)) {
    const auto own = handle->parameter_names();
    names.insert(names.end(), own.begin(), own.end());
  }
  return names;
}

TEST(Fsdp1Units, ExposeOneFlatParameterEach) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model(2);
    wrap(model, {.group = group_of(world)});
    EXPECT_THAT(shown_names(model), ElementsAre("_flat_param", "layers.0._flat_param", "layers.1._flat_param"));
    EXPECT_EQ(handle_names(model), shown_names(model));
    EXPECT_THAT(shown_names(*model.layers[1]), ElementsAre("_flat_param"));
    const auto handles = flat_parameter_handles(model);
    for (size_t i = 0; i < handles.size(); ++i) {
      EXPECT_TRUE(handles[i]->parameters()[0].is_same(model.parameters()[i]));
      EXPECT_EQ(model.parameters()[i].sizes(), at::IntArrayRef({handles[i]->layout().sharded_numel()}));
      EXPECT_TRUE(model.parameters()[i].requires_grad());
      EXPECT_TRUE(handles[i]->shard().is_alias_of(model.parameters()[i]));
    }
    EXPECT_EQ(handles[0]->prefix(), "");
    EXPECT_EQ(handles[2]->prefix(), "layers.1.");
    EXPECT_EQ(flat_parameter_handles(*model.layers[1])[0]->prefix(), "");
    EXPECT_EQ(handles[0]->layout().shared().size(), 1u);
    EXPECT_EQ(handles[0]->layout().shared()[0].fqn, "head");
    EXPECT_EQ(handles[0]->layout().shared()[0].primary_fqn, "embedding");
    mean_backward(model, *world, 0);
    EXPECT_EQ(model.parameters()[1].grad().sizes(), model.parameters()[1].sizes());
  });
}

TEST(Fsdp1Units, ExposeAShardOfEachOriginalParameter) {
  on_threads(3, [](const WorldPtr& world) {
    SmallModel plain, model;
    const auto names = shown_names(plain);
    wrap(model, {.group = group_of(world), .use_orig_params = true});
    EXPECT_EQ(shown_names(model), names);
    EXPECT_EQ(handle_names(model), names);
    EXPECT_TRUE(model.head.is_same(model.embedding));
    mean_backward(model, *world, 0);
    const auto before = whole_values(model);
    bool some_empty = false;
    for (const auto& handle : flat_parameter_handles(model)) {
      const auto infos = handle->shard_param_infos();
      const auto pieces = handle->parameters();
      for (size_t i = 0; i < pieces.size(); ++i) {
        const auto name = handle->prefix() + handle->layout().members()[i].fqn;
        EXPECT_EQ(pieces[i].sizes(), at::IntArrayRef({infos[i].numel_in_shard})) << name;
        EXPECT_EQ(pieces[i].grad().defined(), infos[i].in_shard) << name;
        some_empty = some_empty || !infos[i].in_shard;
        if (!infos[i].in_shard) continue;
        EXPECT_TRUE(
            pieces[i].equal(before.at(name).flatten().narrow(0, infos[i].intra_param_start, pieces[i].numel())));
        const at::NoGradGuard no_grad;
        pieces[i].add_(1);
      }
    }
    EXPECT_TRUE(some_empty || world->rank() == 1);
    for (const auto& [name, value] : whole_values(model)) EXPECT_TRUE(value.equal(before.at(name) + 1)) << name;
  });
}

TEST(Fsdp1Units, KeepShapesWithoutSharding) {
  for (const int size : {1, 2}) {
    on_threads(size, [](const WorldPtr& world) {
      SmallModel plain, model;
      const auto strategy = world->size() == 1 ? ShardingStrategy::kFullShard : ShardingStrategy::kNoShard;
      wrap(model, {group_of(world), strategy, true});
      const auto handles = flat_parameter_handles(model);
      EXPECT_EQ(handles[0]->sharding_strategy(), ShardingStrategy::kNoShard);
      EXPECT_EQ(handles[0]->shard().numel(), handles[0]->layout().unpadded_numel());
      EXPECT_TRUE(handles[0]->shard_param_infos()[1].in_shard);
      const auto parameters = model.parameters();
      for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(parameters[i].equal(plain.parameters()[i]));
      mean_backward(model, *world, 0);
      for (const auto& parameter : parameters) EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
    });
  }
}

TEST(Fsdp1Units, KeepAlignmentPaddingInTheShard) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    wrap(model, {.group = group_of(world), .use_orig_params = true});
    const auto handle = flat_parameter_handles(model)[1];
    const auto& layout = handle->layout();
    std::vector<at::Tensor> values;
    for (const auto& member : layout.members()) values.push_back(whole_values(model).at("layers.0." + member.fqn));
    EXPECT_TRUE(handle->shard().equal(layout.shard(layout.flatten(values), world->rank())));
    // norm has 6 elements, followed by two elements of padding.
    EXPECT_EQ(handle->shard()[7].item<float>() == 42, world->rank() == 0);
  });
}

TEST(Fsdp1Units, FlattenASharedChildModuleOnce) {
  on_threads(2, [](const WorldPtr& world) {
    struct Sharing : nn::Callable<Sharing> {
      std::shared_ptr<Layer> layer;
      Sharing() {
        Values values(5);
        layer = register_module("a", std::make_shared<Layer>(values, 6, 10));
        register_module("b", layer);
      }
      at::Tensor forward(const at::Tensor& x) { return (*layer)((*layer)(x)); }
    } plain, model;
    wrap_fsdp1(model, {.group = group_of(world)});
    const auto& layout = flat_parameter_handles(model)[0]->layout();
    EXPECT_EQ(layout.members().size(), 4u);
    EXPECT_EQ(layout.shared().size(), 4u);
    EXPECT_EQ(layout.shared()[1].fqn, "b.up");
    EXPECT_EQ(layout.shared()[1].primary_fqn, "a.up");
    plain(here(at::ones({2, 6}))).sum().backward();
    model(here(at::ones({2, 6}))).sum().backward();
    EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), kTolerance);
  });
}

TEST(Fsdp1Units, MayHaveNoParametersAroundNestedUnits) {
  on_threads(2, [](const WorldPtr& world) {
    struct Around : nn::Callable<Around> {
      std::shared_ptr<SmallModel> inner = register_module("inner", std::make_shared<SmallModel>());
      at::Tensor forward(const at::Tensor& tokens) { return (*inner)(tokens); }
    } model;
    wrap(*model.inner, {.group = group_of(world)});
    wrap_fsdp1(model, {.group = group_of(world)});
    const auto handles = flat_parameter_handles(model);
    EXPECT_EQ(handles.size(), 4u);
    EXPECT_EQ(handles[1]->prefix(), "inner.layers.0.");
    const auto tokens = tokens_of(0);
    loss_sum(model(tokens), tokens).backward();
    EXPECT_EQ(fsdp_stats(model).reduce_scatters, 4);
  });
}

// Master weights of 16-bit parameters follow values that are written into a shard, as when a checkpoint is loaded.
TEST(Fsdp1Units, MasterWeightsFollowValuesWrittenIntoShards) {
  on_threads(2, [](const WorldPtr& world) {
    for (const auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
      for (const bool use_orig_params : {false, true}) {
        SmallModel model(2, at::kBFloat16, 7), other(2, at::kBFloat16, 9);
        std::vector<std::unique_ptr<optim::Optimizer>> optimizers;
        for (auto* each : {&model, &other}) {
          wrap(*each, {group_of(world), strategy, use_orig_params});
          optimizers.push_back(optim::make_adamw(*each, {.lr = 1e-2}));
        }
        const auto expect_equal_after_a_step = [&] {
          for (auto* each : {&model, &other}) {
            for (const auto& parameter : each->parameters()) {
              if (parameter.numel() > 0) parameter.mutable_grad() = at::full_like(parameter.detach(), 0.5);
            }
          }
          for (const auto& optimizer : optimizers) optimizer->step();
          EXPECT_EQ(distance(whole_values(model), whole_values(other)), 0) << use_orig_params;
        };
        const auto from = flat_parameter_handles(other), to = flat_parameter_handles(model);
        for (const double factor : {1.0, -3.0}) {
          const at::NoGradGuard no_grad;
          for (size_t i = 0; i < to.size(); ++i) {
            from[i]->shard().mul_(factor);
            to[i]->shard().detach().copy_(from[i]->shard());
          }
          for (int step = 0; step < 2; ++step) expect_equal_after_a_step();
        }
      }
    }
  });
}

// ---- clipping ----

TEST(Fsdp1ClipGradNorm, MatchesOneRank) {
  for (const int size : {1, 3}) {
    on_threads(size, [](const WorldPtr& world) {
      for (const bool use_orig_params : {false, true}) {
        for (const double norm_type : {2.0, 1.0, 3.5, static_cast<double>(INFINITY)}) {
          SmallModel plain, model;
          for (auto& layer : model.layers) {
            const auto strategy = layer == model.layers[1] ? ShardingStrategy::kNoShard : ShardingStrategy::kFullShard;
            wrap_fsdp1(*layer, {group_of(world), strategy, use_orig_params});
          }
          wrap_fsdp1(model, {.group = group_of(world), .use_orig_params = use_orig_params});
          plain_backward(plain, 0);
          mean_backward(model, *world, 0);
          const double expected = optim::clip_grad_norm(plain.parameters(), 0.01, {.norm_type = norm_type});
          const double norm = clip_grad_norm_(model, 0.01, norm_type);
          EXPECT_NEAR(norm / expected, 1, 1e-6) << norm_type;
          EXPECT_LT(distance(whole_grads(model), plain_grads(plain)), 2 * kTolerance) << norm_type;
          EXPECT_NEAR(clip_grad_norm_(model, 1e9, norm_type), 0.01, 1e-6);  // clipped by an earlier call, unchanged now
        }
      }
    });
  }
}

TEST(Fsdp1ClipGradNorm, PropagatesNonFiniteGradients) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    wrap(model, {.group = group_of(world)});
    EXPECT_EQ(clip_grad_norm_(model, 1), 0);
    mean_backward(model, *world, 0);
    if (world->rank() == 1) model.parameters()[2].grad()[0].fill_(NAN);
    EXPECT_TRUE(std::isnan(clip_grad_norm_(model, 1)));
    for (const auto& [name, grad] : whole_grads(model)) EXPECT_TRUE(grad.isnan().all().item<bool>()) << name;
    for (const auto& parameter : model.parameters()) parameter.grad().fill_(1e-30);
    model.parameters()[0].grad().fill_(1e30);
    EXPECT_NEAR(clip_grad_norm_(model, 1e40, 20) / 1e30, std::pow(72, 0.05), 1e-4);  // 72 elements
    SmallModel plain;
    EXPECT_THAT(error_of([&] { clip_grad_norm_(plain, 1); }), HasSubstr("Call wrap_fsdp1 first"));
    EXPECT_THAT(error_of([&] { clip_grad_norm_(model, 1, 0); }), HasSubstr("norm type: found 0"));
  });
}

// ---- misuse ----

struct Single : nn::Callable<Single> {
  at::Tensor weight;
  explicit Single(at::Tensor value) { register_parameter("weight", weight, std::move(value)); }
  at::Tensor forward(const at::Tensor& x) { return x * weight.sum(); }
};

TEST(Fsdp1Misuse, RaisesTheSameErrorOnAllRanks) {
  on_threads(3, [](const WorldPtr& world) {
    const auto error_with = [&](Fsdp1Options options, const std::function<void(SmallModel&)>& prepare) {
      SmallModel model;
      prepare(model);
      options.group = group_of(world);
      return error_of([&] { wrap_fsdp1(model, options); });
    };
    const bool odd = world->rank() == 1;
    EXPECT_THAT(error_with({.use_orig_params = odd}, [](auto&) {}),
                HasSubstr("use_orig_params: false on rank 0, true on rank 1"));
    EXPECT_THAT(error_with({.sharding_strategy = odd ? ShardingStrategy::kNoShard : ShardingStrategy::kFullShard},
                           [](auto&) {}),
                HasSubstr("sharding_strategy: FULL_SHARD on rank 0, NO_SHARD on rank 1"));
    EXPECT_THAT(error_with({},
                           [&](auto& model) {
                             if (odd) model.layers[1]->set_requires_grad(false);
                           }),
                HasSubstr("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"));
    EXPECT_THAT(error_with({},
                           [&](auto& model) {
                             if (odd) wrap_fsdp1(*model.layers[1], {.group = world->new_group({1}, "alone")});
                           }),
                HasSubstr("the ranks differ"));
    EXPECT_EQ(error_with({}, [](auto&) {}), "");
  });
}

TEST(Fsdp1Misuse, RefusesInvalidModulesAndOptions) {
  on_threads(2, [](const WorldPtr& world) {
    const Fsdp1Options options{.group = group_of(world)};
    const auto refusal = [&](const at::Tensor& value) {
      Single single(value);
      return error_of([&] { wrap_fsdp1(single, options); });
    };
    EXPECT_THAT(refusal(here(at::ones({4, 4})).narrow(1, 0, 2)),
                HasSubstr("weight: strides 4,1 of shape 4x2 leave gaps"));
    EXPECT_THAT(refusal(at::empty({4}, at::kMeta)), HasSubstr("weight: still on the meta device"));
    EXPECT_THAT(refusal(distribute_tensor(here(at::ones({4})), line(world), {Shard(0)})), HasSubstr("found a DTensor"));
    EXPECT_EQ(refusal(here(at::ones({}))), "");
    SmallModel model;
    EXPECT_THAT(error_of([&] { wrap_fsdp1(model, {}); }), HasSubstr("options.group is not set"));
    EXPECT_EQ(flat_parameter_handles(model).size(), 0u);
    wrap(model, options);
    EXPECT_THAT(error_of([&] { wrap_fsdp1(model, options); }), HasSubstr("on this module already"));
    EXPECT_THAT(error_of([&] { fully_shard(model, {.mesh = line(world)}); }), HasSubstr("on this module already"));

    SmallModel mixed;
    fully_shard(*mixed.layers[0], {.mesh = line(world)});
    EXPECT_THAT(error_of([&] { wrap_fsdp1(mixed, options); }), HasSubstr("Use one of the three"));
    SmallModel other;
    wrap_fsdp1(*other.layers[0], options);
    EXPECT_THAT(error_of([&] { fully_shard(other, {.mesh = line(world)}); }), HasSubstr("wrap_fsdp1 was called on a"));

    SmallModel top_down;
    wrap_fsdp1(top_down, {.group = group_of(world), .use_orig_params = true});
    EXPECT_THAT(error_of([&] { wrap_fsdp1(*top_down.layers[0], options); }),
                HasSubstr("norm: Cannot flatten a `FlatParameter`"));
  });
}

TEST(Fsdp1Misuse, RefusesTiesAcrossUnitsAndForwardBeforeTheRoot) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool use_orig_params : {false, true}) {
      TiedToItsLayer tied;
      wrap_fsdp1(*tied.layer, {.group = group_of(world), .use_orig_params = use_orig_params});
      EXPECT_THAT(error_of([&] { wrap_fsdp1(tied, {.group = group_of(world)}); }),
                  HasSubstr("copy: this parameter is shared with a nested unit"));
      SmallModel model;
      wrap(model, {.group = group_of(world), .use_orig_params = use_orig_params});
      (*model.layers[1])(here(at::ones({2, 6})));
      EXPECT_THAT(error_of([&] { model(tokens_of(0)); }),
                  HasSubstr("'layers.1': its forward ran before that of the root above it"));
    }
  });
}

TEST(Fsdp1Misuse, RefusesUseOfFreedOrReplacedParameters) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel model;
    wrap(model, {.group = group_of(world)});
    EXPECT_EQ(model.layers[0]->up.sizes(), at::IntArrayRef({10, 6}));
    EXPECT_THAT(error_of([&] { model.layers[0]->up.sum(); }), HasSubstr("its parameters are freed"));
    mean_backward(model, *world, 0);
    EXPECT_THAT(error_of([&] { model.layers[0]->up.sum(); }), HasSubstr("layers.0: its parameters are freed"));
    at::Tensor leaked;
    model.layers[0]->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& inputs) {
      leaked = at::linear(*inputs[0], model.layers[0]->up).sum();  // after the hook that gathers
    });
    model(tokens_of(0));
    EXPECT_THAT(error_of([&] { leaked.backward(); }), HasSubstr("layers.0: its parameters are freed"));
    for (const bool use_orig_params : {false, true}) {
      Single single(here(at::ones({4})));
      wrap_fsdp1(single, {.group = group_of(world), .use_orig_params = use_orig_params});
      nn::Module::set_parameter(*single.named_parameters()[0].slot, here(at::ones({4})).set_requires_grad(true));
      EXPECT_THAT(error_of([&] { single(here(at::ones({2}))); }), HasSubstr("was replaced by another tensor"));
    }
  });
}

}  // namespace
}  // namespace tessera::testing
