// Assigns layers to pipeline stages, and removes the layers of other ranks from a model.
//
//   StagePlan plan = plan_stages(config.num_hidden_layers, schedule.rank_of);      // 10 layers, 4 stages: 3, 3, 2, 2
//   auto model = make_model(config, {.device = at::kMeta});
//   keep_stages(*model, plan, pp_rank);              // before parallelize_model, loading and the optimizer
//
// The remaining layers keep their FQNs (model.layers.7.mlp.up_proj.weight), so the same files, seeds and checkpoints
// can be used with every parallel layout. In a model with tied embeddings, the rank of the last stage keeps the
// embedding, too, because its weight is the head's weight. No communication.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline {

struct StagePlan {
  std::vector<int64_t> layers;  // number of layers of each stage
  std::vector<int> rank_of;     // pipeline rank of each stage
  int stages() const { return static_cast<int>(layers.size()); }
  StageRange range(int stage) const;
  std::vector<int> stages_of(int rank) const { return stages_of_rank(rank_of, rank); }
  int last_rank() const { return rank_of.back(); }
};

// Splits the layers evenly: layers / stages for each stage, and one more for each of the first (layers mod stages)
// stages. Error kConfig: fewer than one stage, or more stages than layers.
std::vector<int64_t> split_layers(int64_t layers, int stages);
// Makes a plan from an explicit list of layers per stage; an empty list means split_layers. Error kConfig: the list
// does not have one entry per stage, its sum is not `layers`, or a stage that is neither the first nor the last has no
// layers.
StagePlan plan_stages(int64_t layers, const std::vector<int>& rank_of,
                      const std::vector<int64_t>& layers_of_stages = {});

// The number of stages per rank. With layers_per_stage 0 it is 1 for a schedule with one stage per rank, else 2.
// Otherwise there are ceil(layers / layers_per_stage) stages in total; `round` ("up", "down") rounds them to a multiple
// of `ranks`. Error kConfig: a number of stages that `ranks` does not divide and an empty `round`; another word for
// `round`; more than one stage per rank for a schedule that has one; one stage per rank for a schedule that has
// several.
int stages_per_rank(const ScheduleTraits& schedule, int64_t layers, int ranks, int64_t layers_per_stage = 0,
                    const std::string& round = "");

// Removes all layers, embedding, norm and head that are not part of the rank's stages. Errors kConfig: a model without
// decoder layers, a plan for another number of layers.
void keep_stages(CausalLM& model, const StagePlan& plan, int rank);

}  // namespace tessera::pipeline
