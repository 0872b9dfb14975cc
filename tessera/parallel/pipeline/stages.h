// Which layers each stage of a pipeline has, and a model that holds those of one rank alone.
//
//   StagePlan plan = plan_stages(config.num_hidden_layers, schedule.rank_of);      // 10 layers, 4 stages: 3, 3, 2, 2
//   auto model = make_model(config, {.device = at::kMeta});
//   keep_stages(*model, plan, pp_rank);              // before parallelize_model, loading and the optimizer
//
// What is left keeps its names (model.layers.7.mlp.up_proj.weight), so that files, seeds and checkpoints mean the same
// on every layout. Of a model with tied embeddings, the rank of the last stage keeps the embedding beside its head,
// whose weight it is. No communication.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline {

struct StagePlan {
  std::vector<int64_t> layers;  // how many each stage has
  std::vector<int> rank_of;     // of each stage
  int stages() const { return static_cast<int>(layers.size()); }
  StageRange range(int stage) const;
  std::vector<int> stages_of(int rank) const { return stages_on(rank_of, rank); }
  int last_rank() const { return rank_of.back(); }
};

// layers / stages of each, the first (layers mod stages) one more. Error kConfig: fewer stages than 1, or more than
// layers.
std::vector<int64_t> split_layers(int64_t layers, int stages);
// layers_of_stages: an explicit list; empty: split_layers. Error kConfig: a list of another length or sum, a stage
// without layers that has neither embedding nor head to run.
StagePlan plan_stages(int64_t layers, const std::vector<int>& rank_of,
                      const std::vector<int64_t>& layers_of_stages = {});

// How many stages a rank has. layers_per_stage: 0: one where the schedule wants one, else two. Otherwise
// ceil(layers / layers_per_stage) stages in all; round ("up", "down") brings that to a multiple of ranks. Error
// kConfig: no multiple and no round, another word, several stages a rank for a schedule of one, one for another.
int stages_per_rank(const ScheduleTraits& schedule, int64_t layers, int ranks, int64_t layers_per_stage = 0,
                    const std::string& round = "");

// Takes away what is not of the rank's stages. Errors kConfig: a model that is no decoder, a plan for another number of
// layers.
void keep_stages(CausalLM& model, const StagePlan& plan, int rank);

}  // namespace tessera::pipeline
