// Tests the state dict functions of parallel models. Every layout must load the dict of every other layout.
#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/parallel/data_parallel.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tessera/state/cpu_state_dict.h"
#include "tessera/state/optimizer_forms.h"
#include "tessera/state/state_dict.h"
#include "tests/parallel/small_model.h"
#include "tests/parallel/styled.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A layout of a model over the ranks of its world; HSDP takes 4 ranks.
struct ParallelLayout {
  const char* name;
  int ranks;
  std::function<void(SmallModel&, const WorldPtr&)> apply;
};
const std::vector<ParallelLayout>& parallel_layouts() {
  static const std::vector<ParallelLayout> all = {
      {"plain", 1, [](SmallModel&, const WorldPtr&) {}},
      {"DDP", 2, [](SmallModel& model, const WorldPtr& world) { replicate(model, {.mesh = line(world)}); }},
      {"FSDP", 3, [](SmallModel& model, const WorldPtr& world) { shard(model, {.mesh = line(world)}); }},
      {"FSDP that keeps, checkpointed", 2,
       [](SmallModel& model, const WorldPtr& world) {
         for (auto& layer : model.layers) checkpoint_activations(*layer);
         shard(model, {.mesh = line(world), .reshard_after_forward = false});
       }},
      {"HSDP", 4,
       [](SmallModel& model, const WorldPtr& world) {
         shard(model, {.mesh = init_device_mesh(world, "cpu", {2, 2}, {"replicate", "shard"})});
       }},
  };
  return all;
}

// A float64 model with its optimizer. The optimizer has two groups of parameters; the model has tied weights.
struct Trained {
  SmallModel model;
  std::unique_ptr<optim::Optimizer> optimizer;
  std::shared_ptr<comm::World> world;

  Trained(const ParallelLayout& layout, const WorldPtr& of, uint64_t seed) : model(2, at::kDouble, seed), world(of) {
    layout.apply(model, world);
    make_optimizer(0.01);
  }
  void make_optimizer(double lr) {
    optimizer =
        optim::make_adamw(model, {.lr = lr, .weight_decay = 0.1, .groups = {{.names = {"norm"}, .lr_factor = 2}}});
  }
  void step(int number) {
    if (world->size() > 1) set_gradient_divide_factor(model, 1);
    rank_backward(model, *world, number);
    optimizer->step();
    optimizer->zero_grad();
  }
  StateDictOptions options(StateDictOptions more = {}) const {
    more.group = world->group();
    return more;
  }
  ModelAndOptimizerState get(StateDictOptions more = {}) {
    return get_state_dict(model, {optimizer.get()}, options(std::move(more)));
  }
  IncompatibleKeys set(const ModelAndOptimizerState& state, StateDictOptions more = {}) {
    return set_state_dict(model, {optimizer.get()}, state.model, state.optimizer, options(std::move(more)));
  }
};

double largest_difference(const StateValue& a, const StateValue& b) {
  double worst = 0;
  if (a.is_tensor()) {
    const auto difference = (a.tensor().to(at::kDouble) - b.tensor().to(at::kDouble)).abs();
    return difference.numel() == 0 ? 0 : difference.max().item<double>();
  }
  if (a.is_dict()) {
    for (const auto& [key, value] : a.dict()) worst = std::max(worst, largest_difference(value, b.dict().at(key)));
  }
  return worst;
}

ModelAndOptimizerState copy_of_both(const ModelAndOptimizerState& state) {
  return {.model = copy_of(state.model), .optimizer = copy_of(state.optimizer)};
}

// Values of a run on one process: its dicts after two steps, and its parameters after three.
struct Reference {
  ModelAndOptimizerState after_two;
  std::vector<at::Tensor> after_three;
};
const Reference& reference() {
  static const Reference once = [] {
    Trained plain(parallel_layouts()[0], comm::World::single(), 7);
    plain.step(0);
    plain.step(1);
    Reference out{.after_two = copy_of_both(plain.get()), .after_three = {}};
    plain.step(2);
    out.after_three = whole_parameters(plain.model);
    return out;
  }();
  return once;
}

TEST(ParallelStateDict, EveryLayoutGivesTheSameStateDict) {
  reference();
  for (const auto& layout : parallel_layouts()) {
    SCOPED_TRACE(layout.name);
    on_threads(layout.ranks, [&](const WorldPtr& world) {
      Trained trained(layout, world, 7);
      trained.step(0);
      trained.step(1);
      const auto whole = trained.get({.full_state_dict = true});
      EXPECT_EQ(keys_of(whole.model), keys_of(reference().after_two.model));
      EXPECT_TRUE(check_state_dict_similarity(whole.optimizer, reference().after_two.optimizer));
      EXPECT_LT(largest_difference(whole.model, reference().after_two.model), 1e-10);
      EXPECT_LT(largest_difference(whole.optimizer.at("state"), reference().after_two.optimizer.at("state")), 1e-10);
      const auto on_rank_0 = trained.get({.full_state_dict = true, .cpu_offload = true});
      EXPECT_EQ(on_rank_0.model.empty(), world->rank() != 0);
      EXPECT_EQ(on_rank_0.optimizer.empty(), world->rank() != 0);
      if (world->rank() == 0) {
        EXPECT_TRUE(same_values(on_rank_0.model, whole.model));
        EXPECT_TRUE(same_values(on_rank_0.optimizer, whole.optimizer));
      }
    });
  }
}

// The whole values come from all ranks or from rank 0, by name or flat. The next step must equal the step of one
// process. The target was trained with other values before, so that every value must be replaced.
TEST(ParallelStateDict, EveryLayoutContinuesFromAFullStateDict) {
  reference();
  for (const auto& layout : parallel_layouts()) {
    for (const bool broadcast : {false, true}) {
      SCOPED_TRACE(std::string(layout.name) + (broadcast ? ", broadcast" : ""));
      on_threads(layout.ranks, [&](const WorldPtr& world) {
        Trained trained(layout, world, 23);
        trained.step(5);
        auto given = reference().after_two;
        if (broadcast) given.optimizer = flatten_optimizer_dict(given.optimizer);
        if (broadcast && world->rank() != 0) given = {};
        const auto keys = trained.set(given, {.full_state_dict = true, .broadcast_from_rank0 = broadcast});
        EXPECT_THAT(keys.missing_keys, IsEmpty());
        EXPECT_EQ(trained.optimizer->steps(), 2);
        EXPECT_TRUE(same_values(trained.get({.full_state_dict = true}).model, reference().after_two.model));
        EXPECT_TRUE(same_values(trained.get({.full_state_dict = true}).optimizer, reference().after_two.optimizer));
        trained.step(2);
        EXPECT_LT(distance(whole_parameters(trained.model), reference().after_three), 1e-10);
      });
    }
  }
}

TEST(ParallelStateDict, ShardedStateDictsAreNotGatheredAndRoundTrip) {
  for (const auto& layout : parallel_layouts()) {
    SCOPED_TRACE(layout.name);
    on_threads(layout.ranks, [&](const WorldPtr& world) {
      Trained from(layout, world, 7), to(layout, world, 23);
      from.step(0);
      for (const bool flat : {false, true}) {
        const StateDictOptions options{.cpu_offload = flat, .flatten_optimizer_state_dict = flat};
        const auto parts = from.get(options);
        EXPECT_EQ(is_dtensor(parts.model.at("embedding").tensor()), is_dtensor(from.model.parameters()[0]));
        if (!flat) {
          EXPECT_EQ(to_local_if_dtensor(parts.model.at("norm").tensor()).data_ptr(),
                    to_local_if_dtensor(from.model.own_parameters()[2].parameter.detach()).data_ptr());
        }
        to.step(9);
        to.set(copy_of_both(parts), options);
        EXPECT_TRUE(same_values(to.get(options).model, parts.model));
        EXPECT_TRUE(same_values(to.get(options).optimizer, parts.optimizer));
      }
    });
  }
}

TEST(ParallelStateDict, ValuesOfAnotherLayoutAreErrors) {
  on_threads(2, [](const WorldPtr& world) {
    Trained sharded(parallel_layouts()[2], world, 7), plain(parallel_layouts()[1], world, 7);
    const auto parts = sharded.get();
    EXPECT_THAT(error_of([&] { plain.set(parts); }), HasSubstr("wanted a plain tensor. Gather it first"));
    const auto mesh = init_device_mesh(world, "cpu", {1, 2}, {"replicate", "shard"});
    SmallModel other(2, at::kDouble);
    shard(other, {.mesh = mesh});
    EXPECT_THAT(error_of([&] { set_model_state_dict(other, parts.model); }),
                HasSubstr("Redistribute it, or pass it as a whole tensor"));
  });
}

// If a rank cannot load a value of rank 0, every rank gets its error.
TEST(ParallelStateDict, AnErrorOfOneRankIsRaisedOnAllRanks) {
  reference();
  on_threads(3, [](const WorldPtr& world) {
    SmallModel model(world->rank() == 1 ? 1 : 2, at::kDouble);
    const StateDictOptions options{.full_state_dict = true, .broadcast_from_rank0 = true, .group = world->group()};
    const auto text = error_of([&] { set_model_state_dict(model, reference().after_two.model, options); });
    EXPECT_THAT(text, HasSubstr("Unexpected key(s) in state_dict: 'layers.1.norm'"));
    EXPECT_THAT(text, HasSubstr("rank 1"));
    const auto optimizer = optim::make_adamw(model, {.groups = {{.names = {"norm"}}}});
    auto state = copy_of(reference().after_two.optimizer);
    state.at("state").dict().erase("norm");
    EXPECT_THAT(error_of([&] { set_optimizer_state_dict(model, {optimizer.get()}, state, options); }),
                HasSubstr("Missing optimizer state for parameter 'norm'"));
  });
}

TEST(ParallelStateDict, LoadsIntoModelsOnTheMetaDevice) {
  reference();
  on_threads(3, [](const WorldPtr& world) {
    for (const bool broadcast : {false, true}) {
      SmallModel model(2, at::TensorOptions(at::kDouble).device(at::kMeta));
      shard(model, {.mesh = line(world)});
      EXPECT_THAT(error_of([&] { get_model_state_dict(model, {.full_state_dict = true}); }), HasSubstr("meta device"));
      set_model_state_dict(model, world->rank() == 0 || !broadcast ? reference().after_two.model : StateDict(),
                           {.full_state_dict = true, .broadcast_from_rank0 = broadcast});
      EXPECT_TRUE(same_values(get_model_state_dict(model, {.full_state_dict = true}), reference().after_two.model));
      const auto optimizer = optim::make_adamw(model, {.lr = 3, .weight_decay = 0.1, .groups = {{.names = {"norm"}}}});
      set_optimizer_state_dict(model, {optimizer.get()}, reference().after_two.optimizer, {.full_state_dict = true});
      set_gradient_divide_factor(model, 1);
      rank_backward(model, *world, 2);
      optimizer->step();
      EXPECT_LT(distance(whole_parameters(model), reference().after_three), 1e-10);
    }
  });
}

TEST(ParallelStateDict, FrozenParametersMayBeIgnored) {
  on_threads(2, [](const WorldPtr& world) {
    SmallModel from(2), to(2, at::kFloat, 23);
    for (auto* model : {&from, &to}) {
      for (auto& slot : model->layers[0]->own_parameters()) slot.parameter.set_requires_grad(false);
      shard(*model, {.mesh = line(world)});
    }
    const StateDictOptions options{.full_state_dict = true, .ignore_frozen_params = true};
    const auto dict = get_model_state_dict(from, options);
    EXPECT_FALSE(dict.contains("layers.0.up"));
    EXPECT_TRUE(dict.contains("layers.1.up"));
    const auto frozen = copy_of(get_model_state_dict(to, {.full_state_dict = true}).at("layers.0.up"));
    EXPECT_THAT(set_model_state_dict(to, dict, options).missing_keys, IsEmpty());
    const auto after = get_model_state_dict(to, {.full_state_dict = true});
    EXPECT_TRUE(same_values(after.at("layers.0.up"), frozen));
    EXPECT_TRUE(same_values(after.at("layers.1.up"), dict.at("layers.1.up")));
    const auto optimizer = optim::make_adamw(from, {});
    const auto states = get_optimizer_state_dict(from, {optimizer.get()}, {.full_state_dict = true});
    EXPECT_FALSE(states.at("state").dict().contains("layers.0.up"));
    set_optimizer_state_dict(from, {optimizer.get()}, states, {.full_state_dict = true});
  });
}

// Tensor parallelism with FSDP, and with HSDP, gives strided shards.
TEST(ParallelStateDict, SupportsTensorParallelModels) {
  Stack plain({.tied = true});
  const auto plain_optimizer = optim::make_adamw(plain, {.lr = 0.1});
  train(plain, *plain_optimizer, 2);
  const auto weights = get_model_state_dict(plain);
  const auto states = get_optimizer_state_dict(plain, {plain_optimizer.get()});
  for (const bool replicas : {false, true}) {
    on_threads(replicas ? 8 : 4, [&](const WorldPtr& world) {
      const auto mesh = replicas ? init_device_mesh(world, "cpu", {2, 2, 2}, {"replicate", "shard", "tp"})
                                 : init_device_mesh(world, "cpu", {2, 2}, {"shard", "tp"});
      Stack stack({.tied = true});
      draw(stack, 99);
      parallelize_module(stack, mesh->slice({"tp"}), stack_plan(false));
      const FullyShardOptions fsdp{.mesh = replicas ? mesh->slice({"replicate", "shard"}) : mesh->slice({"shard"}),
                                   .replicated_over = mesh->slice({"tp"})};
      for (const auto& block : stack.blocks) fully_shard(*block, fsdp);
      fully_shard(stack, fsdp);
      const auto optimizer = optim::make_adamw(stack, {});
      for (const bool broadcast : {false, true}) {
        {
          const c10::NoGradGuard no_grad;
          for (const auto& parameter : stack.parameters()) local_tensor_of(parameter).zero_();
        }
        const bool has = !broadcast || world->rank() == 0;
        const StateDictOptions options{.full_state_dict = true, .broadcast_from_rank0 = broadcast};
        set_state_dict(stack, {optimizer.get()}, has ? weights : StateDict(), has ? states : StateDict(), options);
        const auto got = get_state_dict(stack, {optimizer.get()}, {.full_state_dict = true});
        EXPECT_TRUE(same_values(got.model, weights));
        EXPECT_TRUE(same_values(got.optimizer, states));
      }
    });
  }
}

}  // namespace
}  // namespace tessera::testing
