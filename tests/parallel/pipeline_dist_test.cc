// Tests of pipelines: training gives the results of one rank with every schedule, memory follows the schedule's table,
// and the pipeline ends when a rank ends.
#include <gmock/gmock.h>

#include <mutex>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tessera/parallel/pipeline/check_schedule.h"
#include "tests/parallel/pipeline_model.h"

namespace tessera::testing {
namespace {

using pipeline::PipelineOptions;
using ::testing::HasSubstr;

struct Case {
  const char* schedule;
  int stages_per_rank;
};
const std::vector<Case> kCases = {{"GPipe", 1},           {"1F1B", 1},
                                  {"LoopedBFS", 2},       {"Interleaved1F1B", 2},
                                  {"Interleaved1F1B", 3}, {"InterleavedZeroBubble", 2},
                                  {"ZBVZeroBubble", 2},   {"DualPipeV", 2}};

// Trains with every schedule. The first stages have one layer more than the other stages.
void expect_trains(int ranks) {
  for (const auto& [schedule, stages_per_rank] : kCases) {
    if (stages_per_rank > 2 && ranks > 2) continue;
    const auto changes = layers(std::max(stages_per_rank, 2) * ranks + 1);
    const auto batches = documents(2 * ranks, 8);
    const auto wanted = trained_whole(changes, batches);
    on_threads(ranks, [&, schedule = schedule, stages_per_rank = stages_per_rank](const WorldPtr& world) {
      const auto what = fmt::format("{} on {} ranks, {} stages each", schedule, ranks, stages_per_rank);
      PipelineRig rig(changes, {.mesh = stages_mesh(world), .schedule = schedule, .stages_per_rank = stages_per_rank});
      const double loss = rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)}).item<double>();
      EXPECT_TRUE(rig.pipeline->has_last_stage() || loss == 0) << what;
      rig.expect_like(wanted, sum_of_ranks(world, loss), what);
      const auto told = pipeline::simulate(rig.pipeline->schedule(2 * ranks));
      EXPECT_EQ(rig.pipeline->max_held(), told.max_held[static_cast<size_t>(world->rank())]) << what;
      const double evaluated =
          sum_of_ranks(world, rig.pipeline->evaluate(here(batches)).item<double>()) / labels_in(batches);
      EXPECT_NEAR(evaluated, wanted.loss, 1e-5 * wanted.loss) << what;
    });
  }
}

TEST(Pipeline, EveryScheduleTrainsAsOneRankOn2) { expect_trains(2); }
TEST(Pipeline, EveryScheduleTrainsAsOneRankOn3) { expect_trains(3); }
TEST(Pipeline, EveryScheduleTrainsAsOneRankOn4) { expect_trains(4); }

TEST(Pipeline, TiedEmbeddingsStayBitwiseEqual) {
  const auto changes = layers(5, R"("tie_word_embeddings": true)");
  const auto batches = documents(4);
  const auto wanted = trained_whole(changes, batches);
  on_threads(2, [&](const WorldPtr& world) {
    for (const auto& [schedule, stages_per_rank] :
         {Case{"1F1B", 1}, {"GPipe", 1}, {"Interleaved1F1B", 2}, {"DualPipeV", 2}}) {
      PipelineRig rig(changes, {.mesh = stages_mesh(world), .schedule = schedule, .stages_per_rank = stages_per_rank});
      const double loss = rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)}).item<double>();
      rig.expect_like(wanted, sum_of_ranks(world, loss), schedule);
      // A second step adds the same gradients to the existing gradients.
      rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)});
      const auto named = rig.model->named_parameters();
      if (named.front().name != "model.embed_tokens.weight") continue;
      const auto gradient = named.front().slot->parameter.grad();
      const auto& once = wanted.gradients.at(named.front().name);
      EXPECT_LE((gradient.cpu() - 2 * once).abs().max().item<double>(), 2e-4 * once.abs().max().item<double>())
          << schedule;
      if (std::string(schedule) == "DualPipeV") continue;  // both the first and the last stage are on one rank
      auto both = at::empty({2, gradient.numel()});
      comm::all_gather_into(*world->group(), both, gradient.flatten().cpu()).wait();
      EXPECT_TRUE(both[0].equal(both[1])) << schedule;
    }
  });
}

TEST(Pipeline, LayersOfStagesOptionAssignsLayers) {
  const auto changes = layers(4);
  const auto batches = documents(3);
  const auto wanted = trained_whole(changes, batches);
  on_threads(3, [&](const WorldPtr& world) {
    for (const auto& list : std::vector<std::vector<int64_t>>{{0, 4, 0}, {1, 1, 2}, {0, 1, 3}}) {
      PipelineRig rig(changes, {.mesh = stages_mesh(world), .schedule = "GPipe", .layers_of_stages = list});
      EXPECT_EQ(static_cast<int64_t>(rig.model->blocks().size()), list[static_cast<size_t>(world->rank())]);
      const double loss = rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)}).item<double>();
      rig.expect_like(wanted, sum_of_ranks(world, loss), fmt::format("{} layers on the first stage", list[0]));
    }
    const PipelineOptions empty{.mesh = stages_mesh(world), .schedule = "GPipe", .layers_of_stages = {2, 0, 2}};
    EXPECT_THAT(error_of([&] { PipelineRig rig(changes, empty); }), HasSubstr("stage 1 has 0"));
    const PipelineOptions many{.mesh = stages_mesh(world), .schedule = "LoopedBFS", .stages_per_rank = 2};
    EXPECT_THAT(error_of([&] { PipelineRig rig(changes, many); }), HasSubstr("6 stages of 4 layers"));
  });
}

TEST(Pipeline, Gemma3TrainsAsOneRank) {
  const auto changes = tiny_gemma3_changes() + R"(, "num_hidden_layers": 4, "layer_types": ["sliding_attention",
    "full_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": true)";
  const auto batches = documents(4);
  const auto wanted = trained_whole(changes, batches);
  on_threads(2, [&](const WorldPtr& world) {
    PipelineRig rig(changes, {.mesh = stages_mesh(world), .schedule = "ZBVZeroBubble", .stages_per_rank = 2});
    const double loss = rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)}).item<double>();
    rig.expect_like(wanted, sum_of_ranks(world, loss), "gemma3");
  });
}

// The micro-batches of one rank of data parallelism.
std::vector<ModelInputs> share_of(const std::vector<ModelInputs>& batches, int64_t rank, int64_t ranks) {
  std::vector<ModelInputs> out;
  for (size_t i = static_cast<size_t>(rank); i < batches.size(); i += static_cast<size_t>(ranks)) {
    out.push_back(batches[i]);
  }
  return out;
}

struct Composition {
  const char* dim;
  bool sequence_parallel = false;
  bool tied = false;
  ActivationCheckpointing checkpointing = ActivationCheckpointing::kNone;
};

void expect_composes(const Composition& with, const std::vector<Case>& cases) {
  const auto changes = layers(5, with.tied ? R"("tie_word_embeddings": true)" : R"("tie_word_embeddings": false)");
  const auto batches = documents(8, 8);
  const auto wanted = trained_whole(changes, batches);
  on_threads(4, [&](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"pp", with.dim});
    const bool data_parallel = std::string(with.dim) != "tp";
    const auto own = data_parallel ? share_of(batches, mesh->local_rank(1), 2) : batches;
    for (const auto& [schedule, stages_per_rank] : cases) {
      for (const bool reduce_each : {false, true}) {
        const bool some = std::string(schedule) == "GPipe" || std::string(schedule) == "InterleavedZeroBubble";
        if (reduce_each && (std::string(with.dim) != "dp_shard" || !some)) continue;
        const auto what = fmt::format("{} with {}, reduce_each {}, sequence parallel {}, tied {}", schedule, with.dim,
                                      reduce_each, with.sequence_parallel, with.tied);
        PipelineRig rig(changes, {.mesh = mesh, .schedule = schedule, .stages_per_rank = stages_per_rank},
                        {.mesh = mesh,
                         .sequence_parallel = with.sequence_parallel,
                         .activation_checkpointing = with.checkpointing});
        double loss = rig.pipeline->step(here(own), {.loss_divisor = labels_in(batches), .reduce_each = reduce_each})
                          .item<double>();
        if (!data_parallel && mesh->local_rank(1) != 0) loss = 0;
        rig.expect_like(wanted, sum_of_ranks(world, loss), what);
      }
    }
  });
}

// Several micro-batches run forward before the first backward, but only one gradient of the head is kept.
TEST(Pipeline, KeepsOneHeadGradientForAllMicroBatches) {
  const auto changes = layers(2);
  const auto batches = documents(5);
  on_threads(2, [&](const WorldPtr& world) {
    for (const char* schedule : {"GPipe", "1F1B"}) {
      PipelineRig rig(changes, {.mesh = stages_mesh(world), .schedule = schedule});
      std::vector<bool> head_has_gradient;
      rig.model->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs&) {
        for (const auto& named : rig.model->named_parameters()) {
          if (named.name != "lm_head.weight") continue;
          head_has_gradient.push_back(named.slot->parameter.grad().defined());
        }
      });
      rig.pipeline->step(here(batches));
      if (world->rank() == 0) continue;
      // Recorded before each forward. The gradient of the previous micro-batch is already added.
      EXPECT_THAT(head_has_gradient, ::testing::ElementsAre(false, true, true, true, true)) << schedule;
      EXPECT_EQ(rig.pipeline->max_held(), std::string(schedule) == "GPipe" ? 5 : 1);
    }
  });
}

const std::vector<Case> kAllKinds = {
    {"1F1B", 1}, {"GPipe", 1}, {"Interleaved1F1B", 2}, {"InterleavedZeroBubble", 2}, {"DualPipeV", 2}};

TEST(Pipeline, FullyShardedStagesTrainAsOneRank) {
  expect_composes({.dim = "dp_shard"}, kAllKinds);
  expect_composes({.dim = "dp_shard", .tied = true}, {{"GPipe", 1}});
}

TEST(Pipeline, LayersStayUnshardedFromUnshardToReshard) {
  const auto changes = layers(5);
  const auto batches = documents(8, 8);
  on_threads(4, [&](const WorldPtr& world) {
    const auto mesh = init_device_mesh(world, test_device_type(), {2, 2}, {"pp", "dp_shard"});
    const auto own = share_of(batches, mesh->local_rank(1), 2);
    for (const char* schedule : {"1F1B", "GPipe"}) {
      PipelineRig rig(changes, {.mesh = mesh, .schedule = schedule}, {.mesh = mesh});
      const auto gathers = [&](bool reduce_each) {
        reset_fsdp_stats(*rig.model);
        rig.pipeline->step(here(own), {.loss_divisor = labels_in(batches), .reduce_each = reduce_each});
        return fsdp_stats(*rig.model);
      };
      const auto each = gathers(true), once = gathers(false), again = gathers(true);
      const int64_t own_layers = mesh->local_rank(0) == 0 ? 3 : 2;
      EXPECT_EQ(each.all_gathers - once.all_gathers, own_layers * (2 * 4 - 1)) << schedule;
      EXPECT_EQ(again.all_gathers, each.all_gathers) << schedule << ": as before";
      EXPECT_EQ(once.unsharded_groups, each.unsharded_groups) << schedule;
    }
  });
}

TEST(Pipeline, ReplicatedStagesTrainAsOneRank) {
  expect_composes({.dim = "dp_replicate"}, {{"1F1B", 1}, {"InterleavedZeroBubble", 2}});
  expect_composes({.dim = "dp_replicate", .tied = true}, {{"1F1B", 1}});
}

TEST(Pipeline, TensorParallelStagesTrainAsOneRank) {
  expect_composes({.dim = "tp"}, {{"GPipe", 1}, {"InterleavedZeroBubble", 2}, {"DualPipeV", 2}});
  expect_composes({.dim = "tp", .tied = true}, {{"1F1B", 1}});
}

TEST(Pipeline, SequenceParallelStagesTrainAsOneRank) {
  expect_composes({.dim = "tp", .sequence_parallel = true}, {{"1F1B", 1}, {"InterleavedZeroBubble", 2}});
}

TEST(Pipeline, RecomputedStagesTrainAsOneRank) {
  for (const auto how : {ActivationCheckpointing::kFull, ActivationCheckpointing::kMlp}) {
    expect_composes({.dim = "dp_shard", .checkpointing = how}, {{"ZBVZeroBubble", 2}});
  }
}

TEST(Pipeline, RunsOverGlooToo) {
  const auto changes = layers(5);
  const auto batches = documents(4, 8);
  const auto wanted = trained_whole(changes, batches);
  const auto body = [&](const WorldPtr& world) {
    for (const auto& [schedule, stages_per_rank] : {Case{"1F1B", 1}, {"ZBVZeroBubble", 2}}) {
      PipelineRig rig(changes, {.mesh = stages_mesh(world), .schedule = schedule, .stages_per_rank = stages_per_rank});
      const double loss = rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)}).item<double>();
      rig.expect_like(wanted, sum_of_ranks(world, loss), schedule);
    }
  };
  comm::run_thread_ranks(2, body, {.backend = "gloo"});
}

// The input of a stage is freed with its micro-batch's backward.
TEST(Pipeline, KeepsNoMoreInputsThanTheScheduleTable) {
  const auto changes = layers(4);
  const auto batches = documents(8);
  on_threads(4, [&](const WorldPtr& world) {
    for (const char* schedule : {"1F1B", "GPipe"}) {
      PipelineRig rig(changes, {.mesh = stages_mesh(world), .schedule = schedule});
      using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
      std::vector<Weak> inputs;
      int most = 0;
      rig.model->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs& tensors) {
        for (const auto* tensor : tensors) {
          if (tensor->is_floating_point()) inputs.emplace_back(tensor->getIntrusivePtr());
        }
        int held = 0;
        for (const auto& each : inputs) held += !each.expired();
        most = std::max(most, held);
      });
      rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)});
      if (world->rank() == 0) continue;  // the first stage receives only tokens
      EXPECT_EQ(most, std::string(schedule) == "GPipe" ? 8 : 4 - world->rank()) << schedule;
    }
  });
}

TEST(Pipeline, WhenARankDiesAllEndWithAnError) {
  TESSERA_CPU_ONLY("NCCL keeps what an error leaves under way, the pretend device does not");
  const auto changes = layers(3);
  const auto batches = documents(6);
  std::mutex mutex;
  std::map<int, std::string> errors;
  on_threads(3, [&](const WorldPtr& world) {
    PipelineRig rig(changes, {.mesh = stages_mesh(world)});
    int forwards = 0;
    rig.model->register_forward_pre_hook([&](nn::Module&, nn::TensorRefs&) {
      if (world->rank() == 1 && ++forwards == 3) raise(ErrorKind::kInternal, "this rank dies");
    });
    const auto error = error_of([&] { rig.pipeline->step(here(batches)); });
    const std::lock_guard lock(mutex);
    errors[world->rank()] = error;
  });
  ASSERT_EQ(errors.size(), 3u);
  EXPECT_EQ(errors[1], "this rank dies");
  for (const int rank : {0, 2}) EXPECT_THAT(errors[rank], HasSubstr("rank")) << rank;
}

TEST(Pipeline, InvalidStepsAreRefusedBeforeCommunication) {
  const auto changes = layers(4);
  on_threads(2, [&](const WorldPtr& world) {
    PipelineRig rig(changes, {.mesh = stages_mesh(world)});
    EXPECT_THAT(error_of([&] { rig.pipeline->step(documents(1)); }), HasSubstr("Number of microbatches (1)"));
    EXPECT_THAT(error_of([&] { rig.pipeline->step({}); }), HasSubstr("no micro-batches"));
    auto unlabelled = documents(2);
    unlabelled[1].labels.reset();
    EXPECT_THAT(error_of([&] { rig.pipeline->step(unlabelled); }), HasSubstr("micro-batch 1: found 0 labels"));
    {
      const at::NoGradGuard no_grad;
      EXPECT_THAT(error_of([&] { rig.pipeline->step(documents(2)); }), HasSubstr("Call evaluate() instead"));
    }
    auto whole = tiny_model(layers(4));
    EXPECT_THAT(error_of([&] { rig.model->logits({.tokens = tiny_tokens(1, 4)}); }), HasSubstr("ModelInputs::stage"));
    auto wrong = make_model(ModelConfig::parse(tiny_config(changes), "tiny"), {.device = at::kMeta});
    const PipelineOptions options{.mesh = stages_mesh(world)};
    pipeline::keep_stages(*wrong, pipeline::plan_pipeline(wrong->config(), options), 1 - world->rank());
    EXPECT_THAT(error_of([&] { pipeline::Pipeline pipeline(*wrong, options); }), HasSubstr("Call keep_stages"));
    // The pipeline still works after the error.
    EXPECT_NO_THROW(rig.pipeline->step(documents(2)));
  });
}

TEST(Pipeline, RunsAScheduleTableFromCsv) {
  const auto changes = layers(4);
  const auto batches = documents(2);
  const auto wanted = trained_whole(changes, batches);
  const auto csv = "0F0,0F1,,,0I0,0W0,0B1\n,1F0,1F1,1I0,1W0,1B1\n";
  on_threads(2, [&](const WorldPtr& world) {
    const auto table = pipeline::schedule_of_table(pipeline::ScheduleTable::from_csv(csv, "own.csv"), "own.csv");
    PipelineRig rig(changes, {.mesh = stages_mesh(world), .table = table});
    rig.expect_like(
        wanted,
        sum_of_ranks(world, rig.pipeline->step(here(batches), {.loss_divisor = labels_in(batches)}).item<double>()),
        "own");
    EXPECT_THAT(error_of([&] { rig.pipeline->step(documents(3)); }),
                HasSubstr("3 micro-batches, but the schedule own.csv"));
  });
}

// The executor with one stage gives the gradients of plain accumulation, with equal bits.
TEST(Pipeline, OneStageEqualsGradientAccumulationBitwise) {
  const auto batches = documents(4);
  const auto wanted = trained_whole("", batches);
  auto model = tiny_model();
  pipeline::Pipeline pipeline(*model);
  EXPECT_EQ(pipeline.step(here(batches), {.loss_divisor = labels_in(batches)}).item<double>(), wanted.loss);
  for (const auto& named : model->named_parameters()) {
    EXPECT_TRUE(named.slot->parameter.grad().equal(wanted.gradients.at(named.name))) << named.name;
  }
  EXPECT_EQ(pipeline.max_held(), 1);
}

}  // namespace
}  // namespace tessera::testing
