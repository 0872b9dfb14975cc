#include "tessera/parallel/pipeline/stages.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/nn/modules_of.h"

namespace tessera::pipeline {

// Stages contain consecutive layers, so a stage begins at the sum of the layers before it.
StageRange StagePlan::range(int stage) const {
  const auto first = layers.begin(), here = first + stage;
  const int64_t before = std::accumulate(first, here, int64_t{0});
  return {.first_layer = before, .end_layer = before + *here, .is_first = stage == 0, .is_last = stage == stages() - 1};
}

std::vector<int64_t> split_layers(int64_t layers, int stages) {
  TESSERA_CHECK(stages >= 1 && stages <= layers, ErrorKind::kConfig,
                "[pipeline.stages] {} stages of {} layers: wanted at least one stage, and a layer for each. Lower "
                "parallel.pp or the stages of a rank.",
                stages, layers);
  std::vector<int64_t> out(static_cast<size_t>(stages), layers / stages);
  for (int64_t i = 0; i < layers % stages; ++i) ++out[static_cast<size_t>(i)];
  return out;
}

StagePlan plan_stages(int64_t layers, const std::vector<int>& rank_of, const std::vector<int64_t>& layers_of_stages) {
  const auto stages = static_cast<int>(rank_of.size());
  if (layers_of_stages.empty()) return {split_layers(layers, stages), rank_of};
  TESSERA_CHECK(layers_of_stages.size() == rank_of.size(), ErrorKind::kConfig,
                "[pipeline.stages] layers of stages [{}]: {} stages, wanted {}", fmt::join(layers_of_stages, ", "),
                layers_of_stages.size(), stages);
  const int64_t sum = std::accumulate(layers_of_stages.begin(), layers_of_stages.end(), int64_t{0});
  TESSERA_CHECK(sum == layers, ErrorKind::kConfig,
                "[pipeline.stages] layers of stages [{}]: {} in all, the model has {}",
                fmt::join(layers_of_stages, ", "), sum, layers);
  for (int stage = 0; stage < stages; ++stage) {
    // The first stage has the embedding and the last stage the head, so these two may have no layers.
    const bool has_more = stage == 0 || stage == stages - 1;
    TESSERA_CHECK(
        layers_of_stages[static_cast<size_t>(stage)] >= (has_more ? 0 : 1), ErrorKind::kConfig,
        "[pipeline.stages] layers of stages [{}]: stage {} has {}, wanted at least one: only the first and the "
        "last stage have something else to run",
        fmt::join(layers_of_stages, ", "), stage, layers_of_stages[static_cast<size_t>(stage)]);
  }
  return {layers_of_stages, rank_of};
}

int stages_per_rank(const ScheduleTraits& schedule, int64_t layers, int ranks, int64_t layers_per_stage,
                    const std::string& round) {
  TESSERA_CHECK(round.empty() || round == "up" || round == "down", ErrorKind::kConfig,
                "[pipeline.stages] round: found {}, wanted up or down", quote(round));
  TESSERA_CHECK(ranks > 0 && layers_per_stage >= 0, ErrorKind::kConfig,
                "[pipeline.stages] {} ranks, {} layers a stage: wanted at least one rank", ranks, layers_per_stage);
  if (layers_per_stage == 0) return schedule.one_stage_per_rank ? 1 : 2;
  const int64_t stages = (layers + layers_per_stage - 1) / layers_per_stage;
  TESSERA_CHECK(
      stages % ranks == 0 || !round.empty(), ErrorKind::kConfig,
      "[pipeline.stages] {} layers with {} a stage are {} stages, which {} ranks do not divide. Set round to up "
      "or down, or other layers per stage.",
      layers, layers_per_stage, stages, ranks);
  const int64_t each = stages % ranks == 0 ? stages / ranks : stages / ranks + (round == "up" ? 1 : 0);
  const bool fits = schedule.one_stage_per_rank ? each == 1 : each >= 2;
  TESSERA_CHECK(
      fits, ErrorKind::kConfig,
      "[pipeline.stages] {}: {} layers with {} a stage on {} ranks are {} stages a rank, wanted {}. Set other "
      "layers per stage.",
      schedule.name, layers, layers_per_stage, ranks, each, schedule.one_stage_per_rank ? "one" : "at least two");
  return static_cast<int>(each);
}

void keep_stages(CausalLM& model, const StagePlan& plan, int rank) {
  const auto decoders = nn::modules_of<DecoderModel>(model);
  TESSERA_CHECK(!decoders.empty(), ErrorKind::kConfig,
                "[pipeline.stages] {}: a model without decoder layers cannot be cut into stages",
                model.config().architecture);
  auto& decoder = *decoders.front().second;
  const auto count = static_cast<int64_t>(decoder.layers->list.size());
  const int64_t planned = std::accumulate(plan.layers.begin(), plan.layers.end(), int64_t{0});
  TESSERA_CHECK(planned == count, ErrorKind::kConfig, "[pipeline.stages] the plan is for {} layers, the model has {}",
                planned, count);
  std::vector<bool> kept(static_cast<size_t>(count), false);
  bool first = false, last = false;
  for (const int stage : plan.stages_of(rank)) {
    const auto range = plan.range(stage);
    first = first || range.is_first;
    last = last || range.is_last;
    std::fill(kept.begin() + range.first_layer, kept.begin() + range.end_layer, true);
  }
  for (int64_t layer = 0; layer < count; ++layer) {
    if (!kept[static_cast<size_t>(layer)]) decoder.layers->replace_child(std::to_string(layer), nullptr);
  }
  // Removed children are null in the model; DecoderModel's forward skips them by StageRange.
  if (!first && !(last && model.config().tie_word_embeddings)) decoder.replace_child("embed_tokens", nullptr);
  if (last) return;
  decoder.replace_child("norm", nullptr);
  model.replace_child("lm_head", nullptr);
}

}  // namespace tessera::pipeline
