// Makes a whole language model parallel over a mesh in one call: tensor and sequence parallelism, expert and context
// parallelism, activation checkpointing, mixed precision, and FSDP, HSDP or DDP.
//
//   auto mesh = init_device_mesh(world, "cpu", {2, 2}, {"dp_shard", "tp"});
//   auto model = make_parallel_model(config, at::kFloat, {.mesh = mesh, .sequence_parallel = true});
//   load_pretrained(*model, folder);
//
// Semantics of NeMo RL's _parallelize_model. The checks need no parameter values, so an option that does not fit is
// refused while the model is on the meta device, before any weight is read. After an error the model may be partly
// changed.
#pragma once

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/parallel/data_parallel.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tessera/parallel/pipeline/pipeline.h"
#include "tessera/parallel/tensor_parallel/model_plans.h"

namespace tessera {

struct ParallelizeModelOptions {
  // The dims dp_replicate, dp_shard (or dp), cp and tp are used; other dims are ignored. A missing dim counts as a dim
  // of size 1. At least one of the four dims must exist.
  MeshPtr mesh = {};
  MixedPrecisionPolicy mp_policy = {};
  // Expert-parallel size: the number of ranks that share the experts of a layer. It must divide the number of experts,
  // and the product of the sizes of dp_replicate, dp_shard, cp and tp.
  int64_t ep = 1;
  // How context parallelism exchanges keys and values: "allgather", or "alltoall" for ring attention
  // (apply_context_parallel).
  std::string cp_rotate_method = "allgather";
  // The residual stream between tensor-parallel blocks is sharded along the sequence. With tp 1 a warning is logged and
  // nothing changes.
  bool sequence_parallel = false;
  ActivationCheckpointing activation_checkpointing = ActivationCheckpointing::kNone;
  // Decoder layers are captured as CUDA graphs (layer_graphs.h). A CPU mesh has no graphs: a line is logged and nothing
  // changes. Error kConfig with tp or cp above 1, for a model with experts, and for every layer that graph_layers
  // refuses.
  bool layer_graphs = false;
  // Keeps shards, gradients and optimizer state in host memory (FullyShardOptions::cpu_offload). On a CPU mesh a line
  // is logged and nothing changes. Error kConfig on an accelerator with DDP, that is, if dp_replicate is above 1 and
  // dp_shard, cp and tp are 1.
  bool cpu_offload = false;
  PlanChoice plan = AutoPlan{};
  // For models with fewer key-value heads than tp ranks, where tp is a multiple of the heads: every rank keeps the
  // whole key and value projections, and uses the one head that its query heads read.
  bool replicate_kv = false;
  // Asynchronous tensor parallelism: the all-gathers and reduce-scatters of sequence parallelism run in chunks that
  // overlap the matrix products. Needs sequence_parallel, the model family's own plan, at least one key-value head per
  // tp rank, and layers without experts.
  bool async_tensor_parallel = false;
  ReplicateOptions replicate = {};  // used for DDP: dp_replicate above 1; dp_shard, cp and tp 1
};

// Applies, in this order: the tensor-parallel plan (head counts are checked first, key-value heads before query heads),
// expert parallelism, context parallelism of attention, activation checkpoints, graphs of layers, and data parallelism.
// Data parallelism calls fully_shard over dp_shard x cp, with replicas over dp_replicate, on each layer, then on the
// embedding and the head if their weights are not tied, then on the model for the remaining parameters. If dp_replicate
// is above 1 and dp_shard, cp and tp are 1, it calls replicate() on the model instead.
//
// With cp above 1 each rank passes its own tokens of every row (kernels::ContextLayout). With tp above 1 all parameters
// become DTensors over the data-parallel dims and tp; a parameter outside the plan is replicated over tp. With ep or tp
// above 1 the experts are sharded over a separate mesh (ep_shard, ep), by separate fully_shard calls
// (parallel/experts/expert_parallel.h).
//
// COLLECTIVE over the mesh. Errors kConfig: head counts that tp does not divide, experts or ranks that ep does not
// divide, ep above 1 for a model without experts, a plan that matches no module or has an unknown style, and every plan
// that resolve_plan refuses; kShape: no mesh, or a mesh with none of the four dims.
void parallelize_model(CausalLM& model, const ParallelizeModelOptions& options);

// Makes a model on the meta device, keeps this rank's pipeline stages of it, parallelizes it, and allocates its
// parameters on the mesh's device without initialising them: load or initialise the values next. The shards of one FSDP
// unit share one buffer. COLLECTIVE over the mesh. Errors as parallelize_model and keep_stages.
std::shared_ptr<CausalLM> make_parallel_model(const ModelConfig& config, c10::ScalarType dtype,
                                              const ParallelizeModelOptions& options,
                                              const pipeline::PipelineOptions& stages = {});

// Checks only that the head counts fit tp ranks. Error kConfig.
void check_heads(const ModelConfig& config, int64_t tp, bool replicate_kv);

}  // namespace tessera
