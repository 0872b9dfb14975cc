#include "tessera/train/run/run_layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/parallel/pipeline/check_schedule.h"

namespace tessera::train {
namespace {

int stages_of_a_rank(const ParallelSection& parallel, const ModelConfig& config, int64_t ranks) {
  return pipeline::stages_per_rank(pipeline::schedule_traits(parallel.schedule), config.num_hidden_layers,
                                   static_cast<int>(ranks), parallel.layers_per_stage.value_or(0));
}

pipeline::Schedule schedule_of(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config,
                               int64_t micro_batches) {
  return pipeline::make_schedule(recipe.parallel.schedule,
                                 {.ranks = static_cast<int>(layout.pp),
                                  .stages_per_rank = stages_of_a_rank(recipe.parallel, config, layout.pp),
                                  .micro_batches = static_cast<int>(micro_batches)});
}

// The message of the Error that `call` throws; empty if it throws none.
template <class Call>
std::string error_message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Tries every number of layers per stage, so that the message can list those that fit the schedule.
void check_layers_of_stages(const ParallelSection& parallel, const RunLayout& layout, const ModelConfig& config) {
  if (!parallel.layers_per_stage) return;
  std::vector<int64_t> fitting;
  for (int64_t layers = 1; layers <= config.num_hidden_layers; ++layers) {
    auto tried = parallel;
    tried.layers_per_stage = layers;
    if (error_message_of([&] { stages_of_a_rank(tried, config, layout.pp); }).empty()) fitting.push_back(layers);
  }
  TESSERA_CHECK(std::ranges::find(fitting, *parallel.layers_per_stage) != fitting.end(), ErrorKind::kConfig,
                "[train.layout] parallel.layers_per_stage: found {} for {} layers on {} ranks with {}, wanted {}, or "
                "null, which splits them evenly.",
                *parallel.layers_per_stage, config.num_hidden_layers, layout.pp, parallel.schedule,
                fitting.empty() ? "another schedule" : fmt::format("{}", fmt::join(fitting, ", ")));
}

void check_micro_batches(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config) {
  const auto reason = error_message_of([&] { schedule_of(recipe, layout, config, layout.micro_batches); });
  // Every schedule supports 2 * pp micro-batches. If the schedule cannot be made with 2 * pp micro-batches either, the
  // error has another reason than the number of micro-batches, and this function does not raise it.
  if (reason.empty() || !error_message_of([&] { schedule_of(recipe, layout, config, 2 * layout.pp); }).empty()) return;
  raise(ErrorKind::kConfig,
        "[train.layout] parallel.schedule: {} A step has {} micro-batches: train.global_batch_size {} over {} "
        "data-parallel ranks, train.local_batch_size {} each time. Lower train.local_batch_size, or raise "
        "train.global_batch_size.",
        reason, layout.micro_batches, recipe.train.global_batch_size, layout.data_parallel,
        recipe.train.local_batch_size);
}

void check_pipeline(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config) {
  const auto& parallel = recipe.parallel;
  TESSERA_CHECK(layout.pp > 1 || !parallel.layers_per_stage, ErrorKind::kConfig,
                "[train.layout] parallel.layers_per_stage: found {} with pp 1, which has one stage. Set it to null.",
                *parallel.layers_per_stage);
  if (layout.pp == 1) return;
  check_layers_of_stages(parallel, layout, config);
  check_micro_batches(recipe, layout, config);
  pipeline::plan_stages(config.num_hidden_layers, schedule_of(recipe, layout, config, layout.micro_batches).rank_of);
}

void check_quantized(const Recipe& recipe) {
  const auto& quantization = recipe.lora.quantize;
  const std::filesystem::path weights = recipe.model.weights;
  TESSERA_CHECK(
      quantization != "gguf" || (weights.extension() == ".gguf" && recipe.model.init == "pretrained"),
      ErrorKind::kConfig,
      "[train.layout] model.lora.quantize: found gguf with model.weights {} and model.init {}, wanted a .gguf "
      "file and pretrained. Name the file, or use nf4.",
      weights.empty() ? "unset" : quote(weights.string()), recipe.model.init);
}

}  // namespace

// Settings that a layout does not support, with the reason:
// - expert capacity: tokens are dropped per sequence, so a rank must have whole sequences (no tp, no cp);
// - early_step_in_backward: it uses hooks of FSDP groups, so parameters must be sharded and pp must be 1;
// - layer_graphs: a layer can be captured as a graph only without communication (no tp, cp, experts), without weights
//   that are converted once per step (no fp8), and without masks that differ between calls (no dropout);
// - fp8: it converts plain linears, and tp turns linears into DTensors.
void check_layout(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config) {
  check_heads(config, layout.tp, recipe.parallel.replicate_kv);
  const int64_t experts = config.experts.num_experts;
  TESSERA_CHECK(layout.ep == 1 || experts > 0, ErrorKind::kConfig,
                "[train.layout] parallel.ep: found {}, but {} has no experts. Set it to 1.", layout.ep,
                config.architecture);
  TESSERA_CHECK(experts % layout.ep == 0, ErrorKind::kConfig,
                "[train.layout] parallel.ep: found {}, wanted a divisor of the {} experts of a layer.", layout.ep,
                experts);
  TESSERA_CHECK(config.experts.capacity_factor == 0 || (experts > 0 && layout.tp == 1 && layout.cp == 1),
                ErrorKind::kConfig,
                "[train.layout] model.expert_capacity_factor: found {} with {} experts, tp {}, cp {}, wanted experts, "
                "and ranks that have whole sequences. Set it to 0, or parallel.tp and parallel.cp to 1.",
                config.experts.capacity_factor, experts, layout.tp, layout.cp);
  check_pipeline(recipe, layout, config);
  check_quantized(recipe);
  TESSERA_CHECK(recipe.data.sequence_length >= layout.cp, ErrorKind::kConfig,
                "[train.layout] data.sequence_length: found {} with cp {}, wanted a token for each rank at least.",
                recipe.data.sequence_length, layout.cp);
  const bool replicated = layout.dp_replicate > 1 && layout.dp_shard == 1 && layout.tp == 1 && layout.ep == 1;
  TESSERA_CHECK(!recipe.optimizer.early_step_in_backward || (layout.pp == 1 && !replicated), ErrorKind::kConfig,
                "[train.layout] optimizer.early_step_in_backward: found true with pp {}, dp_replicate {} and dp_shard "
                "{}, wanted one pipeline stage, and shards. Set it to false, or parallel.dp_shard above 1.",
                layout.pp, layout.dp_replicate, layout.dp_shard);
  TESSERA_CHECK(
      !recipe.train.layer_graphs || (layout.tp == 1 && layout.cp == 1 && experts == 0), ErrorKind::kConfig,
      "[train.layout] train.layer_graphs: found true with tp {}, cp {} and {} experts of a layer, wanted layers "
      "that a rank computes alone. Set it to false.",
      layout.tp, layout.cp, experts);
  TESSERA_CHECK(!recipe.train.layer_graphs || !recipe.precision.fp8, ErrorKind::kConfig,
                "[train.layout] train.layer_graphs: found true with precision.fp8, which converts weights once a step. "
                "Set one of them to false.");
  TESSERA_CHECK(!recipe.train.layer_graphs || recipe.lora.dropout == 0, ErrorKind::kConfig,
                "[train.layout] train.layer_graphs: found true with model.lora.dropout {}, whose masks depend on the "
                "position in the run. Turn one of them off.",
                recipe.lora.dropout);
  TESSERA_CHECK(!recipe.precision.fp8 || layout.tp == 1, ErrorKind::kConfig,
                "[train.layout] precision.fp8: found true with tp {}, whose linears are DTensors. Set parallel.tp to "
                "1, or precision.fp8 to false.",
                layout.tp);
  TESSERA_CHECK(!recipe.precision.fp8 || !recipe.lora.is_enabled(), ErrorKind::kConfig,
                "[train.layout] precision.fp8: found true with model.lora, whose base linears are not converted. Turn "
                "one of them off.");
}

std::string describe_layout(const RunLayout& layout) {
  return fmt::format("dp_replicate {} x dp_shard {} x tp {} x cp {} x pp {}{}", layout.dp_replicate, layout.dp_shard,
                     layout.tp, layout.cp, layout.pp, layout.ep > 1 ? fmt::format(", ep {}", layout.ep) : "");
}

std::string describe_pipeline(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config) {
  const auto schedule = schedule_of(recipe, layout, config, layout.micro_batches);
  const auto simulated = pipeline::simulate(schedule);
  return fmt::format("{}, stages of {} layers, ranks wait {:.0f} % of the time and hold {} micro-batches at most",
                     schedule.name,
                     fmt::join(pipeline::plan_stages(config.num_hidden_layers, schedule.rank_of).layers, ", "),
                     100 * simulated.bubble_share, *std::ranges::max_element(simulated.max_held));
}

ParallelizeModelOptions layout_options(const ParallelSection& parallel, const MeshPtr& mesh) {
  // Initial values are not broadcast, because all ranks load or draw the same values. DDP's buckets are not rebuilt in
  // the order in which gradients arrive, because our models register their parameters in the order of use.
  return {.mesh = mesh,
          .ep = parallel.ep,
          .cp_rotate_method = parallel.cp_rotate_method,
          .sequence_parallel = parallel.sequence_parallel,
          .cpu_offload = parallel.cpu_offload,
          .plan = parse_plan_choice(parallel.plan),
          .replicate_kv = parallel.replicate_kv,
          .replicate = {.init_sync = false, .broadcast_buffers = false, .rebuild_buckets = false}};
}

pipeline::PipelineOptions pipeline_options(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh) {
  const int64_t ranks = mesh->has_dim("pp") ? mesh->size(mesh->dim_of("pp")) : 1;
  if (ranks == 1) return {};
  return {.mesh = mesh,
          .schedule = recipe.parallel.schedule,
          .stages_per_rank = stages_of_a_rank(recipe.parallel, config, ranks)};
}

}  // namespace tessera::train
