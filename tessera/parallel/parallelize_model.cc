#include "tessera/parallel/parallelize_model.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/modules_of.h"
#include "tessera/parallel/context_parallel/apply_context_parallel.h"
#include "tessera/parallel/data_parallel/data_parallel_state.h"
#include "tessera/parallel/experts/expert_parallel.h"
#include "tessera/parallel/layers/layer_graphs.h"
#include "tessera/parallel/tensor_parallel/parallelize_module.h"

namespace tessera {
namespace {

// The slices of the mesh that this file uses, with dp_shard and cp merged into one dim.
struct ModelMesh {
  MeshPtr data_parallel;    // (shard), or (replicate, shard)
  MeshPtr tensor_parallel;  // null for one rank
  MeshPtr all;              // all dims used here, with dp_shard and cp merged
  MeshPtr experts;          // (ep_shard, ep); null if experts are sharded like other parameters
  int64_t replicas = 1, shards = 1, tensor_ranks = 1;
};

// The size of a dim; 0 if the mesh has no such dim.
int64_t dim_ranks(const DeviceMesh& mesh, const std::string& dim) {
  return mesh.has_dim(dim) ? mesh.size(mesh.dim_of(dim)) : 0;
}

// Context-parallel ranks use the same parameters, so FSDP shards the parameters over these ranks, too. Turns
// (dp_replicate, dp_shard, cp, tp) into (dp_replicate, dp_shard_cp, tp), and reuses the existing process groups.
MeshPtr merge_shard_and_cp_dims(const MeshPtr& mesh, const std::string& shard) {
  std::vector<std::string> names, kept;
  for (const auto& name : {std::string("dp_replicate"), shard, std::string("cp"), std::string("tp")}) {
    if (mesh->has_dim(name)) names.push_back(name);
  }
  const auto stage = mesh->slice(names);  // the ranks of this rank's pipeline stage
  std::vector<std::shared_ptr<comm::Group>> groups;
  std::vector<int64_t> shape, joined;
  for (const auto& name : names) {
    const int64_t dim = stage->dim_of(name);
    const bool is_last_joined = name == "cp";
    if (name == shard || is_last_joined) joined.push_back(dim);
    if (name == shard) continue;
    kept.push_back(is_last_joined ? "dp_shard_cp" : name);
    groups.push_back(is_last_joined ? stage->group(joined) : stage->group(dim));
    shape.push_back(groups.back()->size());
  }
  return mesh_from_groups(mesh->world(), c10::DeviceTypeName(mesh->device_type(), /*lower_case=*/true), groups,
                          stage->ranks(), shape, kept);
}

ModelMesh model_mesh(const MeshPtr& mesh) {
  TESSERA_CHECK(mesh != nullptr, ErrorKind::kShape,
                "[parallel.parallelize_model] no mesh given. Make one with init_device_mesh.");
  ModelMesh out;
  out.all = mesh;
  std::string shard = mesh->has_dim("dp_shard") || !mesh->has_dim("dp") ? "dp_shard" : "dp";
  if (dim_ranks(*mesh, "cp") > 1) {
    out.all = merge_shard_and_cp_dims(mesh, shard);
    shard = "dp_shard_cp";
  }
  const bool replicated = out.all->has_dim("dp_replicate"), sharded = out.all->has_dim(shard);
  TESSERA_CHECK(replicated || sharded || mesh->has_dim("tp"), ErrorKind::kShape,
                "[parallel.parallelize_model] mesh {}: found none of the dims dp_replicate, dp_shard, cp and tp. Pass "
                "these dim names to init_device_mesh.",
                mesh->to_string());
  // The code below needs a shard dim, so a shard dim of size 1 is added if the mesh has none.
  if (!sharded) {
    const std::string last = replicated ? "dp_replicate" : "tp";
    const int64_t size = dim_ranks(*out.all, last);
    out.all =
        replicated ? mesh->unflatten(last, {size, 1}, {last, shard}) : mesh->unflatten(last, {1, size}, {shard, last});
  }
  out.replicas = std::max<int64_t>(dim_ranks(*out.all, "dp_replicate"), 1);
  out.shards = dim_ranks(*out.all, shard);
  out.tensor_ranks = std::max<int64_t>(dim_ranks(*out.all, "tp"), 1);
  out.data_parallel = out.replicas > 1 ? out.all->slice({"dp_replicate", shard}) : out.all->slice({shard});
  if (out.tensor_ranks > 1) out.tensor_parallel = out.all->slice({"tp"});
  return out;
}

ExpertParallelOptions expert_options(const ModelMesh& mesh, const ParallelizeModelOptions& options) {
  return {.mesh = mesh.experts,
          .tensor_parallel = mesh.tensor_parallel,
          .sequence_parallel = options.sequence_parallel && mesh.tensor_ranks > 1};
}

// If ep or tp is above 1, returns a separate mesh for experts (make_expert_mesh). Otherwise returns null, and experts
// are sharded like the other parameters of their layer.
MeshPtr expert_mesh(const CausalLM& model, const ModelMesh& mesh, int64_t ep) {
  const bool has_experts = model.config().experts.num_experts > 0;
  TESSERA_CHECK(has_experts || ep == 1, ErrorKind::kConfig,
                "[parallel.parallelize_model] found ep {}, but {} has no experts. Set parallel.ep to 1.", ep,
                model.config().architecture);
  if (!has_experts || (ep == 1 && mesh.tensor_ranks == 1)) return nullptr;
  auto names = mesh.data_parallel->dim_names();
  if (mesh.all->has_dim("tp")) names.emplace_back("tp");
  return make_expert_mesh(mesh.all->slice(names), ep);
}

// Gives the column-wise key and value projections of the plan the style ReplicatedKeyValue. Key and value projections
// that have another style keep it.
void replicate_key_values(ParallelPlan& plan, int64_t kv_heads) {
  const auto style = std::make_shared<ReplicatedKeyValue>(kv_heads);
  const auto entries = plan.entries();
  for (const auto& [pattern, old] : entries) {
    const bool projection = pattern.ends_with("k_proj") || pattern.ends_with("v_proj");
    if (projection && dynamic_cast<const ColwiseParallel*>(old.get()) != nullptr) plan.set(pattern, style);
  }
}

void apply_plan(CausalLM& model, const ModelMesh& mesh, const ParallelizeModelOptions& options) {
  const auto& config = model.config();
  check_heads(config, mesh.tensor_ranks, options.replicate_kv);
  auto [plan, custom] = resolve_plan(model, options.plan, options.sequence_parallel);
  if (options.async_tensor_parallel) {
    TESSERA_CHECK(
        options.sequence_parallel && !custom && config.num_key_value_heads >= mesh.tensor_ranks &&
            config.experts.num_experts == 0,
        ErrorKind::kConfig,
        "[parallel.parallelize_model] async_tensor_parallel needs sequence_parallel, the family's own plan, a "
        "key-value head for each of {} ranks and layers without experts. Set it to false.",
        mesh.tensor_ranks);
    plan = with_overlap(model, plan);
  }
  if (config.num_key_value_heads < mesh.tensor_ranks) replicate_key_values(plan, config.num_key_value_heads);
  const bool is_logging_rank = mesh.all->rank() == mesh.all->ranks().front();
  parallelize_module(model, mesh.tensor_parallel, plan, {.warn_unmatched = custom && is_logging_rank});
}

// Returns the embedding and the head, on each of which fully_shard is called. The flag of a module says whether the
// module stays gathered after forward. It is true for the head, because the backward of the head comes first. The list
// is empty if embedding and head share a weight, because a tied parameter must be in one parameter group, that of the
// root.
std::vector<std::pair<nn::Module*, bool>> vocabulary_units(nn::Module& model) {
  std::vector<std::pair<nn::Module*, bool>> out;  // module, and whether it stays gathered after forward
  std::vector<at::Tensor> weights;
  for (const auto& [path, module] : model.named_modules()) {
    const bool head = dynamic_cast<nn::Head*>(module) != nullptr;
    if (!head && dynamic_cast<nn::Embedding*>(module) == nullptr) continue;
    const at::Tensor weight = module->own_parameters().front().parameter;
    for (const auto& other : weights) {
      if (other.is_same(weight)) return {};
    }
    weights.push_back(weight);
    out.emplace_back(module, head);
  }
  return out;
}

// The root's mixed-precision policy. In a pipeline the hidden states that a stage sends must keep their dtype, so the
// root must not cast its outputs to output_dtype. A hook on the head casts the head's outputs instead.
MixedPrecisionPolicy root_mp_policy(CausalLM& model, const ParallelizeModelOptions& options) {
  auto policy = options.mp_policy;
  const bool is_cut = static_cast<int64_t>(model.blocks().size()) < model.config().num_hidden_layers;
  if (!is_cut || !policy.output_dtype) return policy;
  for (const auto& [path, head] : nn::modules_of<nn::Head>(model)) {
    head->register_forward_hook(
        [dtype = *policy.output_dtype](nn::Module&, nn::TensorRefs& outputs) { cast_floating(outputs, dtype); });
  }
  policy.output_dtype.reset();
  return policy;
}

void apply_layer_graphs(CausalLM& model, const std::vector<nn::Module*>& layers, const ModelMesh& mesh,
                        const ParallelizeModelOptions& options) {
  TESSERA_CHECK(
      mesh.tensor_ranks == 1 && dim_ranks(*options.mesh, "cp") <= 1 && model.config().experts.num_experts == 0,
      ErrorKind::kConfig,
      "[parallel.parallelize_model] layer_graphs with tensor or context parallelism, or experts: the layers "
      "of this model communicate or read counts on the host, which a graph cannot contain. Set "
      "train.layer_graphs to false, or parallel.tp and parallel.cp to 1.");
  if (!mesh.all->device().is_cpu()) {
    for (const auto& [path, decoder] : nn::modules_of<DecoderModel>(model)) decoder->pad_document_lists();
    return graph_layers(layers, mesh.all->device());
  }
  if (mesh.all->rank() == mesh.all->ranks().front()) {
    log_info("[parallel.parallelize_model] layer_graphs has no effect: the mesh's device is the CPU, without graphs.");
  }
}

void shard_units(CausalLM& model, const std::vector<nn::Module*>& layers, const ModelMesh& mesh,
                 const ParallelizeModelOptions& options) {
  FullyShardOptions inner{.mesh = mesh.data_parallel,
                          .mp_policy = options.mp_policy,
                          .replicated_over = mesh.tensor_parallel,
                          .cpu_offload = options.cpu_offload};
  inner.mp_policy.output_dtype.reset();  // only the root casts its outputs
  if (mesh.experts) shard_experts(model, mesh.experts, inner);
  auto of_layers = inner;
  of_layers.fixed_addresses = options.layer_graphs;
  for (auto* layer : layers) fully_shard(*layer, of_layers);
  for (const auto& [module, keeps_gathered] : vocabulary_units(model)) {
    auto unit = inner;
    if (keeps_gathered) unit.reshard_after_forward = false;
    fully_shard(*module, unit);
  }
  auto root = inner;
  root.mp_policy = root_mp_policy(model, options);
  fully_shard(model, root);
}

}  // namespace

void check_heads(const ModelConfig& config, int64_t tp, bool replicate_kv) {
  const int64_t kv_heads = config.num_key_value_heads, heads = config.num_attention_heads;
  if (kv_heads % tp != 0) {
    // `can`: replicate_kv would make this tp size possible.
    const bool can = kv_heads < tp && tp % kv_heads == 0;
    TESSERA_CHECK(can && replicate_kv, ErrorKind::kConfig,
                  "[parallel.parallelize_model] num_key_value_heads ({}) must be divisible by TP size ({}). {}",
                  kv_heads, tp,
                  can ? "Set parallel.replicate_kv to keep them whole on all ranks, or lower parallel.tp."
                      : "Choose another parallel.tp.");
  }
  TESSERA_CHECK(
      heads % tp == 0, ErrorKind::kConfig,
      "[parallel.parallelize_model] num_attention_heads ({}) must be divisible by TP size ({}). Choose another "
      "parallel.tp.",
      heads, tp);
}

void parallelize_model(CausalLM& model, const ParallelizeModelOptions& options) {
  // The order matters. The tensor-parallel plan and expert parallelism replace parameters by DTensors. Activation
  // checkpoints and CUDA graphs wrap the forward of each layer, but not the layer's hooks. Data parallelism comes last:
  // it shards the parameters that the steps before have made, and its hooks gather them around the wrapped forward.
  auto mesh = model_mesh(options.mesh);
  const bool on_cpu = mesh.all->device_type() == c10::DeviceType::CPU;
  const bool is_logging_rank = mesh.all->rank() == mesh.all->ranks().front();
  mesh.experts = expert_mesh(model, mesh, options.ep);
  if (mesh.experts) check_expert_parallel(model, expert_options(mesh, options));
  if (mesh.tensor_ranks > 1) {
    apply_plan(model, mesh, options);
  } else if (options.sequence_parallel && is_logging_rank) {
    log_warning("[parallel.parallelize_model] sequence_parallel has no effect, because tp is 1.");
  }
  if (mesh.experts) apply_expert_parallel(model, expert_options(mesh, options));
  if (dim_ranks(*options.mesh, "cp") > 1) {
    TESSERA_CHECK(model.config().experts.capacity_factor == 0, ErrorKind::kConfig,
                  "[parallel.parallelize_model] found capacity_factor {} with context parallelism: the capacity is "
                  "counted per whole sequence, but a rank has only a part of each. Set it to 0, or parallel.cp to 1.",
                  model.config().experts.capacity_factor);
    apply_context_parallel(model, options.mesh->slice({"cp"}), {.rotate_method = options.cp_rotate_method});
  }
  std::vector<nn::Module*> layers;
  for (const auto& block : model.blocks()) layers.push_back(block.get());
  checkpoint_layers(layers, options.activation_checkpointing);
  if (options.layer_graphs) apply_layer_graphs(model, layers, mesh, options);
  if (options.cpu_offload && on_cpu && is_logging_rank) {
    log_info("[parallel.parallelize_model] cpu_offload has no effect: the mesh's device is the CPU.");
  }
  if (mesh.tensor_ranks == 1 && mesh.replicas > 1 && mesh.shards == 1 && !mesh.experts) {
    TESSERA_CHECK(
        !options.cpu_offload || on_cpu, ErrorKind::kConfig,
        "[parallel.parallelize_model] cpu_offload on {}: found dp_shard 1, but only sharded parameters can be "
        "offloaded. Set parallel.dp_shard above 1, or parallel.cpu_offload to false.",
        mesh.all->to_string());
    auto replica = options.replicate;
    replica.mesh = mesh.all->slice({"dp_replicate"});
    replica.mp_policy = root_mp_policy(model, options);
    replica.fixed_addresses = options.layer_graphs;
    return replicate(model, replica);
  }
  shard_units(model, layers, mesh, options);
}

std::shared_ptr<CausalLM> make_parallel_model(const ModelConfig& config, c10::ScalarType dtype,
                                              const ParallelizeModelOptions& options,
                                              const pipeline::PipelineOptions& stages) {
  auto model = make_model(config, {.dtype = dtype, .device = c10::Device(at::kMeta)});
  keep_stages(*model, stages);
  parallelize_model(*model, options);
  to_empty(*model, options.mesh->device());
  return model;
}

}  // namespace tessera
