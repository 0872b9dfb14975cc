// What a recipe's layout means for its model: whether it can be, and how the model is cut.
//
//   const RunLayout layout = resolve_layout(recipe, world->size());
//   check_layout(recipe, layout, config);                                 // before any weight is read
//   auto options = pipeline_options(recipe, config, place.mesh());
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

// Error kConfig, with the reason: head counts that tp does not divide, experts that ep does not divide or a model
// without experts, a pipeline with more stages than layers or other micro-batches than its schedule takes, and what
// this version does on fewer layouts.
void check_layout(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config);

// "dp_replicate 1 x dp_shard 2 x tp 2 x cp 1 x pp 1", and ep where it is above 1.
std::string describe_layout(const RunLayout& layout);

// One line: schedule, layers of the stages, the share of time in which ranks wait and the micro-batches that they hold,
// where backward takes twice as long as forward and messages nothing. For pp above 1. Errors as check_layout.
std::string describe_pipeline(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config);

// How the section lays a model out over the mesh. All ranks are to read or draw the same values.
ParallelizeModelOptions layout_options(const ParallelSection& parallel, const MeshPtr& mesh);

// The stages of the recipe over the dim pp of the mesh; where it has one rank, of a model that is whole.
pipeline::PipelineOptions pipeline_options(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh);

}  // namespace tessera::train
