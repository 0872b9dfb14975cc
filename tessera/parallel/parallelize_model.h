// A whole language model over a mesh in one call: tensor and sequence parallelism, activation checkpoints, mixed
// precision, FSDP or HSDP.
//
//   auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp_shard", "tp"});
//   auto model = make_parallel_model(config, at::kFloat, {.mesh = mesh, .sequence_parallel = true});
//   load_pretrained(*model, folder);
//
// Semantics of NeMo RL's _parallelize_model. Everything is checked before a parameter is touched, so a model on the
// meta device is refused before any weight is read.
#pragma once

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/parallel/data_parallel.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tessera/parallel/pipeline/pipeline.h"
#include "tessera/parallel/tensor_parallel/model_plans.h"

namespace tessera {

struct ParallelizeModelOptions {
  // With dims among dp_replicate, dp_shard (or dp), cp and tp, others are left alone. What it has not counts as 1.
  MeshPtr mesh = {};
  MixedPrecisionPolicy mp_policy = {};
  // Ranks that share the experts of a layer: must divide the ranks of all dims of the mesh together, and the experts.
  int64_t ep = 1;
  // Of context parallelism: how keys and values reach the other ranks (apply_context_parallel).
  std::string cp_rotate_method = "allgather";
  // Residuals between tensor-parallel blocks are sharded along the tokens. With tp 1 a warning, nothing else.
  bool sequence_parallel = false;
  ActivationCheckpointing activation_checkpointing = ActivationCheckpointing::kNone;
  // Layers as graphs of the accelerator (layer_graphs.h). On a CPU mesh, which has none, this is said once and changes
  // nothing. Error kConfig with tp, cp or ep above 1, and what graph_layers refuses.
  bool layer_graphs = false;
  // Shards, gradients and optimizer state in host memory (FullyShardOptions). On a CPU mesh they are there already,
  // which is said once. Replicas alone (dp_shard 1, tp 1) are refused on an accelerator: Error kConfig.
  bool cpu_offload = false;
  PlanChoice plan = AutoPlan{};
  // Where there are fewer key-value heads than tp, which must be a multiple of them: their projections are kept whole
  // on all ranks, each of which uses the head that its queries read.
  bool replicate_kv = false;
  // Gathers and scatters of sequence parallelism run in chunks beside the products; needs sequence_parallel, the
  // family's plan and a key-value head for each rank.
  bool async_tensor_parallel = false;
  ReplicateOptions replicate = {};  // where the mesh says DDP: several dp_replicate, one dp_shard, tp 1
};

// In this order: head counts (key-value heads first), plan, experts, attention over cp, activation checkpoints, graphs
// of layers, then fully_shard of each layer over dp_shard x cp, of embedding and head where they are not tied, and of
// the rest, with replicas over dp_replicate. With cp above 1 each rank passes its own tokens of the rows
// (kernels::ContextLayout). With tp above 1 all parameters are DTensors over the dims of data parallelism and tp, those
// outside the plan as replicas. With ep or tp above 1 experts lie over a mesh of their own, (ep_shard, ep), as units of
// FSDP of their own: parallel/experts/expert_parallel.h. COLLECTIVE over the mesh. Errors kConfig: head counts that tp
// does not divide, experts or ranks that ep does not divide, ep above 1 for a model without experts, a plan that fits
// no module or has an unknown style, and what resolve_plan refuses; kShape: a mesh with none of the dims.
void parallelize_model(CausalLM& model, const ParallelizeModelOptions& options);

// A model made on the meta device, cut to this rank's stages of a pipeline, parallelized, and given memory on the
// mesh's device: shards of a group lie in one buffer. Its values are for the caller to load or draw. COLLECTIVE over
// the mesh. Errors as above.
std::shared_ptr<CausalLM> make_parallel_model(const ModelConfig& config, c10::ScalarType dtype,
                                              const ParallelizeModelOptions& options,
                                              const pipeline::PipelineOptions& stages = {});

// The checks of head counts alone. Error kConfig.
void check_heads(const ModelConfig& config, int64_t tp, bool replicate_kv);

}  // namespace tessera
