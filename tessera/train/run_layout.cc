#include "tessera/train/run_layout.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
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
  TESSERA_CHECK(!recipe.lora.on(), ErrorKind::kConfig,
                "[train.layout] lora with parallel.pp {}: this version has adapters on models that are whole, or cut "
                "by dp_shard, tp and cp. Set pp to 1.",
                layout.pp);
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
  TESSERA_CHECK(recipe.data.sequence_length >= layout.cp, ErrorKind::kConfig,
                "[train.layout] data.sequence_length: found {} with cp {}, wanted a token for each rank at least.",
                recipe.data.sequence_length, layout.cp);
  const bool one_reads_rows = layout.cp == 1 && layout.pp == 1;
  TESSERA_CHECK(one_reads_rows || recipe.train.sample_every == 0, ErrorKind::kConfig,
                "[train.layout] train.sample_every: found {} with cp {} and pp {}: this version generates text where "
                "a rank runs all layers over all tokens. Set it to 0.",
                recipe.train.sample_every, layout.cp, layout.pp);
  TESSERA_CHECK(layout.cp == 1 || recipe.lora.dropout == 0, ErrorKind::kConfig,
                "[train.layout] lora.dropout: found {} with cp {}: what is dropped depends on a token's place in its "
                "row, which a rank has in part. Set it to 0.",
                recipe.lora.dropout, layout.cp);
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
