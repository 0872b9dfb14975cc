#include "tessera/train/run_layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/quote.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/parallel/pipeline/check_schedule.h"

namespace tessera::train {
namespace {

int stages_of_a_rank(const ParallelSection& parallel, const ModelConfig& config, int64_t ranks) {
  return pipeline::stages_per_rank(pipeline::schedule_traits(parallel.schedule), config.num_hidden_layers,
                                   static_cast<int>(ranks), parallel.layers_per_stage.value_or(0));
}

pipeline::Schedule schedule_of(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config) {
  return pipeline::make_schedule(recipe.parallel.schedule,
                                 {.ranks = static_cast<int>(layout.pp),
                                  .stages_per_rank = stages_of_a_rank(recipe.parallel, config, layout.pp),
                                  .micro_batches = static_cast<int>(layout.micro_batches)});
}

void check_pipeline(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config) {
  const auto& parallel = recipe.parallel;
  TESSERA_CHECK(layout.pp > 1 || !parallel.layers_per_stage, ErrorKind::kConfig,
                "[train.layout] parallel.layers_per_stage: found {} with pp 1, which has one stage. Set it to null.",
                *parallel.layers_per_stage);
  if (layout.pp == 1) return;
  pipeline::plan_stages(config.num_hidden_layers, schedule_of(recipe, layout, config).rank_of);
}

void check_quantized(const Recipe& recipe, const RunLayout& layout) {
  const auto& how = recipe.lora.quantize;
  if (how == "none") return;
  TESSERA_CHECK(
      layout.tp == 1, ErrorKind::kConfig,
      "[train.layout] model.lora.quantize: found {} with parallel.tp {}: packed weights are bytes, which have "
      "no rows and columns that ranks could share. Use parallel.pp, or dp_shard for the rest of the model.",
      how, layout.tp);
  TESSERA_CHECK(
      recipe.comm.backend != "nccl", ErrorKind::kConfig,
      "[train.layout] model.lora.quantize: found {} with comm.backend nccl: this version decodes packed weights "
      "on CPUs only. Set it to none.",
      how);
  const auto& device = recipe.train.device;
  TESSERA_CHECK(
      device == "auto" || device == "cpu", ErrorKind::kConfig,
      "[train.layout] model.lora.quantize: found {} with train.device {}: this version decodes packed weights "
      "on CPUs only. Set one of them to none or cpu.",
      how, device);
  const std::filesystem::path weights = recipe.model.weights;
  TESSERA_CHECK(
      how != "gguf" || (weights.extension() == ".gguf" && recipe.model.init == "pretrained"), ErrorKind::kConfig,
      "[train.layout] model.lora.quantize: found gguf with model.weights {} and model.init {}, wanted a .gguf "
      "file and pretrained. Name the file, or use nf4.",
      weights.empty() ? "unset" : quote(weights.string()), recipe.model.init);
}

}  // namespace

void check_layout(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config) {
  check_heads(config, layout.tp, recipe.parallel.replicate_kv);
  const int64_t experts = config.experts.count;
  TESSERA_CHECK(layout.ep == 1 || experts > 0, ErrorKind::kConfig,
                "[train.layout] parallel.ep: found {}, but {} has no experts. Set it to 1.", layout.ep,
                config.architecture);
  TESSERA_CHECK(experts % layout.ep == 0, ErrorKind::kConfig,
                "[train.layout] parallel.ep: found {}, wanted a divisor of the {} experts of a layer.", layout.ep,
                experts);
  check_pipeline(recipe, layout, config);
  check_quantized(recipe, layout);
  TESSERA_CHECK(recipe.data.sequence_length >= layout.cp, ErrorKind::kConfig,
                "[train.layout] data.sequence_length: found {} with cp {}, wanted a token for each rank at least.",
                recipe.data.sequence_length, layout.cp);
  TESSERA_CHECK(!recipe.precision.fp8 || layout.tp == 1, ErrorKind::kConfig,
                "[train.layout] precision.fp8: found true with tp {}, whose linears are DTensors. Set parallel.tp to "
                "1, or precision.fp8 to false.",
                layout.tp);
  TESSERA_CHECK(!recipe.precision.fp8 || !recipe.lora.on(), ErrorKind::kConfig,
                "[train.layout] precision.fp8: found true with model.lora, whose linears stay as they were. Set one of "
                "them off.");
}

std::string describe_layout(const RunLayout& layout) {
  return fmt::format("dp_replicate {} x dp_shard {} x tp {} x cp {} x pp {}{}", layout.dp_replicate, layout.dp_shard,
                     layout.tp, layout.cp, layout.pp, layout.ep > 1 ? fmt::format(", ep {}", layout.ep) : "");
}

std::string describe_pipeline(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config) {
  const auto schedule = schedule_of(recipe, layout, config);
  const auto told = pipeline::simulate(schedule);
  return fmt::format("{}, stages of {} layers, ranks wait {:.0f} % of the time and hold {} micro-batches at most",
                     schedule.name,
                     fmt::join(pipeline::plan_stages(config.num_hidden_layers, schedule.rank_of).layers, ", "),
                     100 * told.bubble_share, *std::max_element(told.most_held.begin(), told.most_held.end()));
}

pipeline::PipelineOptions pipeline_options(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh) {
  const int64_t ranks = mesh->has_dim("pp") ? mesh->size(mesh->dim_of("pp")) : 1;
  if (ranks == 1) return {};
  return {.mesh = mesh,
          .schedule = recipe.parallel.schedule,
          .stages_per_rank = stages_of_a_rank(recipe.parallel, config, ranks)};
}

}  // namespace tessera::train
