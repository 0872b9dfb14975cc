// Applies the layout of a recipe to its model: checks that the model can be laid out so, and makes the options for
// parallelize_model and for the pipeline.
//
//   const RunLayout layout = resolve_layout(recipe, world->size());
//   check_layout(recipe, layout, config);                                 // before any weight is read
//   auto options = pipeline_options(recipe, config, run_mesh.mesh());
//
// No communication.
#pragma once

#include <string>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/config/config.h"
#include "tessera/parallel/pipeline/pipeline.h"
#include "tessera/train/recipe/recipe.h"

namespace tessera {
struct ParallelizeModelOptions;
}

namespace tessera::train {

// Checks that a run of `recipe` with the model of `config` is possible on `layout`. Error kConfig, with the reason,
// for: tp that does not divide the head counts; ep that does not divide the experts, or that is above 1 for a model
// without experts; a pipeline with more stages than layers, or with a number of micro-batches that its schedule does
// not support; a layers_per_stage that does not fit the pipeline; sequences with fewer tokens than cp; and settings
// that this layout or the rest of the recipe does not allow (expert_capacity_factor, layer_graphs, fp8,
// early_step_in_backward, quantize).
void check_layout(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config);

// "dp_replicate 1 x dp_shard 2 x tp 2 x cp 1 x pp 1", followed by ep if it is above 1.
std::string describe_layout(const RunLayout& layout);

// One line about a pipeline: the schedule, the layers of each stage, the fraction of time in which ranks wait, and the
// most micro-batches whose activations a rank holds. The times are simulated: backward takes twice as long as forward,
// messages take no time. For pp above 1. Errors as check_layout().
std::string describe_pipeline(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config);

// Options of parallelize_model() for a section `parallel`. All ranks must load or draw the same parameter values, as
// the options turn off their broadcast.
ParallelizeModelOptions layout_options(const ParallelSection& parallel, const MeshPtr& mesh);

// The pipeline options of the recipe over the dim pp of the mesh. If this dim has one rank, the model is one stage.
pipeline::PipelineOptions pipeline_options(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh);

}  // namespace tessera::train
