// Tests of parallelize_model: every layout, family and kind of activation checkpointing gives the results of one rank;
// also communication counts, warnings, errors and plans.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/models/generation/generate.h"
#include "tests/parallel/parallel_families.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 5, kLength = 7;  // 5 and 7 are not divisible by any number of ranks

TEST(ParallelizeModel, EqualsOneRankOnEveryLayoutFamilyAndCheckpointing) {
  expect_layouts_equal_one_rank(kRows, kLength);
}

TEST(ParallelizeModel, ReplicatesKeyValueHeadsWhenThereAreFewerThanRanks) {
  for (const int64_t kv_heads : {1, 2}) {
    const auto families = all_families(/*heads=*/4, kv_heads);
    std::vector<StepOutcome> wanted;
    for (const auto& family : families) wanted.push_back(one_rank_outcome(family, kRows, kLength));
    on_threads(4, [&](const WorldPtr& world) {
      for (const bool sequences : {false, true}) {
        for (const auto how : {ActivationCheckpointing::kNone, ActivationCheckpointing::kSelective}) {
          for (size_t i = 0; i < families.size(); ++i) {
            expect_equals_one_rank({"tp 4 with shared heads", 1, 1, 4, sequences}, families[i], world, how, kRows,
                                   kLength, wanted[i], /*replicate_kv=*/true);
          }
        }
      }
    });
  }
}

TEST(ParallelizeModel, ParametersHavePlacementsOnAllMeshDims) {
  on_threads(4, [](const WorldPtr& world) {
    const ModelLayout layout{"dp 2 x tp 2", 1, 2, 2};
    const auto model = random_model(config_of(all_families()[0]), ParallelizeModelOptions{.mesh = layout.mesh(world)});
    std::map<std::string, std::string> shown;
    for (const auto& named : model->named_parameters()) {
      shown[named.name] = to_string(placements(named.slot->parameter));
      EXPECT_EQ(device_mesh(named.slot->parameter)->to_string(),
                "DeviceMesh((dp_shard=2, tp=2), '" + test_device_type() + "')");
    }
    EXPECT_EQ(shown["model.embed_tokens.weight"], "(_S(0, 2), S(0))");
    EXPECT_EQ(shown["lm_head.weight"], "(_S(0, 2), S(0))");
    EXPECT_EQ(shown["model.norm.weight"], "(S(0), R)");
    EXPECT_EQ(shown["model.layers.1.self_attn.q_proj.bias"], "(_S(0, 2), S(0))");
    EXPECT_EQ(shown["model.layers.1.self_attn.o_proj.weight"], "(S(0), S(1))");
    EXPECT_EQ(shown["model.layers.0.mlp.down_proj.bias"], "(S(0), R)");
  });
}

TEST(ParallelizeModel, CollectivesFollowThePlan) {
  on_threads(2, [](const WorldPtr& world) {
    const auto tally = [&](bool sequences) {
      const ModelLayout layout{"tp 2", 1, 1, 2};
      const auto model =
          random_model(config_of({"LlamaForCausalLM"}),
                       ParallelizeModelOptions{.mesh = layout.mesh(world), .sequence_parallel = sequences});
      CommDebugMode comm;
      model->loss_sum({.tokens = here(at::zeros({1, 6}, at::kLong))}, here(at::zeros({1, 6}, at::kLong))).backward();
      return comm.comm_counts();
    };
    // Forward has 5 collectives: embedding, and attention and MLP of two layers. Backward has 4: attention and MLP. The
    // remaining collectives belong to the head.
    const auto whole = tally(false), sequences = tally(true);
    EXPECT_EQ(whole.counts[static_cast<int>(CommKind::kReduceScatter)], 0);
    EXPECT_GE(whole.counts[static_cast<int>(CommKind::kAllReduce)], 5 + 4);
    EXPECT_GE(sequences.counts[static_cast<int>(CommKind::kReduceScatter)], 5 + 4);
    EXPECT_LT(sequences.counts[static_cast<int>(CommKind::kAllReduce)],
              whole.counts[static_cast<int>(CommKind::kAllReduce)] + 5);
  });
}

TEST(ParallelizeModel, AsyncTensorParallelEqualsOneRankAndGathersInChunks) {
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
          const auto model = random_model(
              config,
              ParallelizeModelOptions{.mesh = mesh, .sequence_parallel = true, .async_tensor_parallel = overlapped});
          CommDebugMode comm;
          const auto found = step_outcome(*model, kRows, kLength, world->rank() / 2, shards, world->group().get(),
                                          /*ranks_with_same_rows=*/2);
          gathers[overlapped] = comm.all_gathers();
          expect_same_step(found, wanted, family.architecture);
        }
        EXPECT_GT(gathers[1], gathers[0]) << "in chunks";
      }
    });
  }
}

TEST(ParallelizeModel, RefusesInvalidOptionsBeforeAnyParameterChanges) {
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
    EXPECT_THAT(refusal({llama, 4, 4, R"(, "base_model_tp_plan": {"norm": "sideways"})"}, {.plan = HfPlan{}}),
                HasSubstr("Unknown parallel style: sideways"));
    EXPECT_THAT(refusal({llama}, {.plan = PlanFile{"nowhere.yaml"}}), HasSubstr("one of three"));
    EXPECT_THAT(refusal({llama}, {.async_tensor_parallel = true}), HasSubstr("needs sequence_parallel"));
    EXPECT_THAT(refusal({llama}, {.plan = ParallelPlan{{"no.module", std::make_shared<ColwiseParallel>()}}}),
                HasSubstr("no.module"));
    EXPECT_THAT(refusal({llama}, {.mesh = init_device_mesh(world, test_device_type(), {4}, {"rows"})}),
                HasSubstr("none of the dims"));
    EXPECT_THAT(refusal({llama}, {.mesh = init_device_mesh(world, "cuda", {4}, {"dp_replicate"}), .cpu_offload = true}),
                HasSubstr("only sharded parameters can be offloaded"));
  });
}

// The text that `call` writes to stderr.
std::string stderr_of(const std::function<void()>& call) {
  ::testing::internal::CaptureStderr();
  call();
  return ::testing::internal::GetCapturedStderr();
}

size_t count_of(const std::string& part, const std::string& text) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) ++count;
  return count;
}

std::string stderr_of_parallelize_model(const TinyFamily& family, int ranks, const ParallelizeModelOptions& options) {
  return stderr_of([&] {
    on_threads(ranks, [&](const WorldPtr& world) {
      auto own = options;
      own.mesh = init_device_mesh(world, test_device_type(), {ranks}, {"tp"});
      parallelize_model(*make_model(config_of(family), {.device = at::kMeta}), own);
    });
  });
}

TEST(ParallelizeModel, WarnsOfUnmatchedPatternsInUserPlansOnly) {
  ASSERT_LE(log_level(), LogLevel::kWarning);
  for (const auto& family : all_families()) {  // Qwen2's plan names norms that only Qwen3 has
    for (const bool sequences : {false, true}) {
      EXPECT_EQ(stderr_of_parallelize_model(family, 2, {.sequence_parallel = sequences}), "") << family.architecture;
    }
    EXPECT_EQ(stderr_of_parallelize_model(family, 2, {.plan = HfPlan{}}), "") << family.architecture;
  }
  const auto own = parse_plan("model.layers.*.mlp.up_proj: colwise_rep\nmodel.layers.*.experts: colwise\n", "own.yaml");
  const auto said = stderr_of_parallelize_model({"LlamaForCausalLM"}, 2, {.plan = own});
  EXPECT_EQ(count_of("'model.layers.*.experts' matches no module", said), 1U) << said;
  EXPECT_EQ(count_of("warning: ", said), 1U) << "from one rank, of one line: " << said;
}

TEST(ParallelizeModel, WarnsOnceThatSequenceParallelismNeedsTensorParallelism) {
  EXPECT_EQ(stderr_of_parallelize_model({"LlamaForCausalLM"}, 1, {}), "");
  const auto said = stderr_of([] {
    on_threads(2, [](const WorldPtr& world) {
      parallelize_model(
          *make_model(config_of({"LlamaForCausalLM"}), {.device = at::kMeta}),
          {.mesh = init_device_mesh(world, test_device_type(), {2, 1}, {"dp_shard", "tp"}), .sequence_parallel = true});
    });
  });
  EXPECT_EQ(count_of("warning: ", said), 1U) << said;
  EXPECT_THAT(said, HasSubstr("sequence_parallel has no effect, because tp is 1"));
}

TEST(ParallelizeModel, AcceptsPlansInAllForms) {
  on_threads(2, [](const WorldPtr& world) {
    const ModelLayout layout{"tp 2", 1, 1, 2};
    const TinyFamily family{"Qwen3ForCausalLM"};
    const auto config = config_of(family);
    const auto mesh = layout.mesh(world);
    const auto plain = random_model(config);
    const auto wanted = step_outcome(*plain, kRows, kLength, 0, 1, nullptr, 1);
    const auto own = parse_plan(
        "model.layers.*.mlp.*e_proj: colwise\n"
        "model.layers.*.mlp.up_proj: {style: colwise, output: shard(-1)}\n"
        "model.layers.*.mlp.down_proj: rowwise\n",
        "own.yaml");
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

TEST(ActivationCheckpointing, IsParsedAndRefusedOnInvalidModules) {
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

TEST(ActivationCheckpointing, RecomputesForwardInBackwardOnly) {
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
