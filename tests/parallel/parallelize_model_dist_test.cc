#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/models/generate.h"
#include "tests/parallel/parallel_families.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 4, kLength = 7;  // 7 divides by no number of ranks

struct ModelLayout {
  std::string name;
  int64_t replicas, shards, tensor_ranks;
  bool sequence_parallel = false;
  int ranks() const { return static_cast<int>(replicas * shards * tensor_ranks); }
  MeshPtr mesh(const WorldPtr& world) const {
    return init_device_mesh(world, "cpu", {replicas, shards, tensor_ranks}, {"dp_replicate", "dp_shard", "tp"});
  }
};

const std::vector<ModelLayout> kLayouts = {{"dp 2", 1, 2, 1},
                                           {"tp 2", 1, 1, 2},
                                           {"tp 2 with sequences", 1, 1, 2, true},
                                           {"tp 4", 1, 1, 4},
                                           {"dp 2 x tp 2", 1, 2, 2},
                                           {"dp 2 x tp 2 with sequences", 1, 2, 2, true},
                                           {"hsdp 2 x 2", 2, 2, 1},
                                           {"ddp 2 x tp 2", 2, 1, 2}};

void expect_equals_one_rank(const ModelLayout& layout, const TinyFamily& family, const WorldPtr& world,
                            ActivationCheckpointing checkpointing, bool replicate_kv = false) {
  const auto config = config_of(family);
  const auto mesh = layout.mesh(world);
  const auto plain = random_model(config);
  const auto wanted = step_outcome(*plain, kRows, kLength, 0, 1, nullptr, 1);
  const auto model = random_model(config, ParallelizeModelOptions{.mesh = mesh,
                                                                  .sequence_parallel = layout.sequence_parallel,
                                                                  .activation_checkpointing = checkpointing,
                                                                  .replicate_kv = replicate_kv});
  const auto part = world->rank() / layout.tensor_ranks;
  const auto found = step_outcome(*model, kRows, kLength, part, layout.replicas * layout.shards, world->group().get(),
                                  layout.tensor_ranks);
  expect_same_step(found, wanted, fmt::format("{}, {}, checkpointing {}", layout.name, family.architecture,
                                              static_cast<int>(checkpointing)));
}

TEST(ParallelizeModel, EqualsOneRankOnEveryLayoutAndFamily) {
  for (const auto& layout : kLayouts) {
    on_threads(layout.ranks(), [&layout](const WorldPtr& world) {
      for (const auto& family : all_families()) {
        expect_equals_one_rank(layout, family, world, ActivationCheckpointing::kNone);
      }
    });
  }
}

TEST(ParallelizeModel, EqualsOneRankWithThreeRanksAndWithEight) {
  const ModelLayout three{"tp 3", 1, 1, 3}, with_sequences{"tp 3 with sequences", 1, 1, 3, true};
  for (const auto& layout : {three, with_sequences}) {
    on_threads(3, [&layout](const WorldPtr& world) {
      for (const auto& family : all_families(/*heads=*/6, /*kv_heads=*/3)) {
        expect_equals_one_rank(layout, family, world, ActivationCheckpointing::kNone);
      }
    });
  }
  const ModelLayout eight{"hsdp 2 x 2 x tp 2", 2, 2, 2};
  on_threads(8, [&](const WorldPtr& world) {
    expect_equals_one_rank(eight, all_families()[0], world, ActivationCheckpointing::kMlp);
    expect_equals_one_rank(eight, all_families()[4], world, ActivationCheckpointing::kNone);
  });
}

TEST(ParallelizeModel, EqualsOneRankWithActivationCheckpoints) {
  for (const auto& layout : kLayouts) {
    on_threads(layout.ranks(), [&layout](const WorldPtr& world) {
      for (const auto how : {ActivationCheckpointing::kMlp, ActivationCheckpointing::kSelective,
                             ActivationCheckpointing::kFull}) {
        for (const size_t family : {size_t{0}, size_t{4}})
          expect_equals_one_rank(layout, all_families()[family], world, how);
      }
    });
  }
}

TEST(ParallelizeModel, RanksShareTheKeyValueHeadsThatAreFewer) {
  for (const int64_t kv_heads : {1, 2}) {
    on_threads(4, [kv_heads](const WorldPtr& world) {
      for (const auto& family : all_families(/*heads=*/4, kv_heads)) {
        for (const bool sequences : {false, true}) {
          expect_equals_one_rank({"tp 4", 1, 1, 4, sequences}, family, world, ActivationCheckpointing::kNone,
                                 /*replicate_kv=*/true);
        }
      }
    });
  }
}

TEST(ParallelizeModel, ParametersLieOverAllDimsOfTheMesh) {
  on_threads(4, [](const WorldPtr& world) {
    const ModelLayout layout{"dp 2 x tp 2", 1, 2, 2};
    const auto model = random_model(config_of(all_families()[0]), ParallelizeModelOptions{.mesh = layout.mesh(world)});
    std::map<std::string, std::string> lies;
    for (const auto& named : model->named_parameters()) {
      lies[named.name] = to_string(placements(named.slot->parameter));
      EXPECT_EQ(device_mesh(named.slot->parameter)->to_string(), "DeviceMesh((dp_shard=2, tp=2), 'cpu')");
    }
    EXPECT_EQ(lies["model.embed_tokens.weight"], "(_S(0, 2), S(0))");
    EXPECT_EQ(lies["lm_head.weight"], "(_S(0, 2), S(0))");
    EXPECT_EQ(lies["model.norm.weight"], "(S(0), R)");
    EXPECT_EQ(lies["model.layers.1.self_attn.q_proj.bias"], "(_S(0, 2), S(0))");
    EXPECT_EQ(lies["model.layers.1.self_attn.o_proj.weight"], "(S(0), S(1))");
    EXPECT_EQ(lies["model.layers.0.mlp.down_proj.bias"], "(S(0), R)");
  });
}

TEST(ParallelizeModel, BlocksCommunicateAsTheirPlanSays) {
  on_threads(2, [](const WorldPtr& world) {
    const auto tally = [&](bool sequences) {
      const ModelLayout layout{"tp 2", 1, 1, 2};
      const auto model = random_model(config_of({"LlamaForCausalLM"}), ParallelizeModelOptions{
                                          .mesh = layout.mesh(world), .sequence_parallel = sequences});
      CommDebugMode comm;
      model->loss_sum({.tokens = at::zeros({1, 6}, at::kLong)}, at::zeros({1, 6}, at::kLong)).backward();
      return comm.tally();
    };
    // Forward: embedding, attention and MLP of two layers. Backward: attention and MLP. The rest is the head's.
    const auto whole = tally(false), sequences = tally(true);
    EXPECT_EQ(whole.counts[static_cast<int>(CommKind::kReduceScatter)], 0);
    EXPECT_GE(whole.counts[static_cast<int>(CommKind::kAllReduce)], 5 + 4);
    EXPECT_GE(sequences.counts[static_cast<int>(CommKind::kReduceScatter)], 5 + 4);
    EXPECT_LT(sequences.counts[static_cast<int>(CommKind::kAllReduce)],
              whole.counts[static_cast<int>(CommKind::kAllReduce)] + 5);
  });
}

TEST(ParallelizeModel, OverlapsProductsAndTheirCollectives) {
  for (const int64_t shards : {1, 2}) {
    on_threads(static_cast<int>(2 * shards), [shards](const WorldPtr& world) {
      for (const size_t index : {size_t{0}, size_t{3}, size_t{4}}) {
        const auto family = all_families()[index];
        const auto config = config_of(family);
        const auto mesh = ModelLayout{"", 1, shards, 2}.mesh(world);
        const auto plain = random_model(config);
        const auto wanted = step_outcome(*plain, kRows, kLength, 0, 1, nullptr, 1);
        int64_t gathers[2] = {};
        for (const bool overlapped : {false, true}) {
          const auto model = random_model(config, ParallelizeModelOptions{.mesh = mesh,
                                                                          .sequence_parallel = true,
                                                                          .async_tensor_parallel = overlapped});
          CommDebugMode comm;
          const auto found =
              step_outcome(*model, kRows, kLength, world->rank() / 2, shards, world->group().get(), /*alike=*/2);
          gathers[overlapped] = comm.all_gathers();
          expect_same_step(found, wanted, family.architecture);
        }
        EXPECT_GT(gathers[1], gathers[0]) << "in chunks";
      }
    });
  }
}

TEST(ParallelizeModel, RefusesBeforeAnyParameterChanges) {
  on_threads(4, [](const WorldPtr& world) {
    const auto mesh = ModelLayout{"tp 4", 1, 1, 4}.mesh(world);
    const auto refusal = [&](const TinyFamily& family, ParallelizeModelOptions options) {
      const auto model = make_model(config_of(family), {.device = at::kMeta});
      options.mesh = options.mesh ? options.mesh : mesh;
      const auto text = error_of([&] { parallelize_model(*model, options); });
      for (const auto& parameter : model->parameters()) EXPECT_FALSE(is_dtensor(parameter)) << text;
      return text;
    };
    const std::string llama = "LlamaForCausalLM";
    EXPECT_THAT(refusal({llama, 4, 2}, {}), HasSubstr("num_key_value_heads (2) must be divisible by TP size (4). Set"));
    EXPECT_THAT(refusal({llama, 6, 3}, {.replicate_kv = true}),
                HasSubstr("num_key_value_heads (3) must be divisible by TP size (4). Choose"));
    EXPECT_THAT(refusal({llama, 2, 1}, {.replicate_kv = true}), HasSubstr("num_attention_heads (2) must be divisible"));
    EXPECT_THAT(refusal({llama}, {.sequence_parallel = true, .plan = HfPlan{}}), HasSubstr("HF tp plan"));
    EXPECT_THAT(refusal({llama}, {.plan = PlanFile{"nowhere.yaml"}}), HasSubstr("one of three"));
    EXPECT_THAT(refusal({llama}, {.async_tensor_parallel = true}), HasSubstr("needs sequence_parallel"));
    EXPECT_THAT(refusal({llama}, {.plan = ParallelPlan{{"no.module", std::make_shared<ColwiseParallel>()}}}),
                HasSubstr("no.module"));
    EXPECT_THAT(refusal({llama}, {.mesh = init_device_mesh(world, "cpu", {4}, {"rows"})}), HasSubstr("none of the dims"));
  });
}

TEST(ParallelizeModel, TakesPlansOfAllForms) {
  on_threads(2, [](const WorldPtr& world) {
    const ModelLayout layout{"tp 2", 1, 1, 2};
    const TinyFamily family{"Qwen3ForCausalLM"};
    const auto config = config_of(family);
    const auto mesh = layout.mesh(world);
    const auto plain = random_model(config);
    const auto wanted = step_outcome(*plain, kRows, kLength, 0, 1, nullptr, 1);
    const auto own = parse_plan("model.layers.*.mlp.*e_proj: colwise\n"
                                "model.layers.*.mlp.up_proj: {style: colwise, output: shard(-1)}\n"
                                "model.layers.*.mlp.down_proj: rowwise\n", "own.yaml");
    const std::function<ParallelPlan()> function = [&] { return own; };
    for (const PlanChoice& choice : {PlanChoice(HfPlan{}), PlanChoice(own), PlanChoice(function)}) {
      const auto model = random_model(config, ParallelizeModelOptions{.mesh = mesh, .plan = choice});
      expect_same_step(step_outcome(*model, kRows, kLength, 0, 1, world->group().get(), 2), wanted,
                       fmt::format("plan {}", choice.index()));
    }
  });
}

TEST(ParallelizeModel, ComputesInTheDtypeOfItsPolicy) {
  on_threads(4, [](const WorldPtr& world) {
    for (const bool sequences : {false, true}) {
      const auto config = config_of(all_families()[3]);
      const auto plain = random_model(config);
      const auto wanted = step_outcome(*plain, kRows, kLength, 0, 1, nullptr, 1);
      const auto model = random_model(
          config, ParallelizeModelOptions{.mesh = ModelLayout{"", 1, 2, 2}.mesh(world),
                                          .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
                                          .sequence_parallel = sequences,
                                          .activation_checkpointing = ActivationCheckpointing::kSelective});
      const auto found = step_outcome(*model, kRows, kLength, world->rank() / 2, 2, world->group().get(), 2);
      EXPECT_NEAR(found.loss, wanted.loss, 3e-2 * wanted.loss);
      EXPECT_NEAR(found.norm, wanted.norm, 5e-2 * wanted.norm);
      for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    }
  });
}

TEST(ParallelizeModel, GeneratesAsOneRank) {
  on_threads(2, [](const WorldPtr& world) {
    for (const bool sequences : {false, true}) {
      const auto config = config_of(all_families()[3]);
      const auto plain = random_model(config);
      const auto model = random_model(config, ParallelizeModelOptions{.mesh = ModelLayout{"", 1, 1, 2}.mesh(world),
                                                                      .sequence_parallel = sequences});
      GenerationOptions options;
      options.max_new_tokens = 6;
      const int64_t prompt[] = {3, 1, 4, 1, 5};
      EXPECT_EQ(generate(*model, prompt, options, {}, world->group().get()), generate(*plain, prompt, options));
    }
  });
}

TEST(ActivationCheckpointing, IsParsedAndAppliedOnce) {
  EXPECT_EQ(parse_activation_checkpointing("true"), ActivationCheckpointing::kMlp);
  EXPECT_EQ(parse_activation_checkpointing("full"), ActivationCheckpointing::kFull);
  EXPECT_THAT(error_of([] { parse_activation_checkpointing("most"); }), HasSubstr("none, mlp"));
  SmallModel model;
  EXPECT_THAT(error_of([&] { checkpoint_layers(blocks_of(model), ActivationCheckpointing::kMlp); }),
              HasSubstr("no child named mlp"));
  checkpoint_activations(*model.layers[0]);
  EXPECT_THAT(error_of([&] { checkpoint_activations(*model.layers[0]); }), HasSubstr("checkpointed already"));
}

struct CountedLayer : nn::Callable<CountedLayer> {
  std::shared_ptr<Layer> layer;
  int forwards = 0;
  explicit CountedLayer(Values& values) {
    register_module("layer", layer, std::make_shared<Layer>(values, SmallModel::kWidth, SmallModel::kHidden));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++forwards;
    return (*layer)(x);
  }
};

TEST(ActivationCheckpointing, RunsForwardAgainInBackwardAlone) {
  Values values(3), same(3);
  CountedLayer plain(values), checkpointed(same);
  checkpoint_activations(checkpointed);
  const auto x = Values(8)({4, SmallModel::kWidth});
  const auto gradient_of_input = [&](CountedLayer& module) {
    const auto leaf = x.clone().set_requires_grad(true);
    auto y = module(leaf);
    EXPECT_EQ(module.forwards, 1);
    (y * y).sum().backward();
    return leaf.grad();
  };
  const auto wanted = gradient_of_input(plain), found = gradient_of_input(checkpointed);
  EXPECT_EQ(checkpointed.forwards, 2);
  EXPECT_TRUE(found.equal(wanted));
  EXPECT_TRUE(same_bits(whole_gradients(checkpointed), whole_gradients(plain)));
  const at::NoGradGuard no_grad;
  checkpointed(x);
  EXPECT_EQ(checkpointed.forwards, 3);
}

}  // namespace
}  // namespace tessera::testing
