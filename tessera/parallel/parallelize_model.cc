#include "tessera/parallel/parallelize_model.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/parallelize_module.h"

namespace tessera {
namespace {

// The dims of a mesh that count here, each of its slices null where there is none.
struct ModelMesh {
  MeshPtr data_parallel;    // (shard), or (replicate, shard)
  MeshPtr tensor_parallel;  // null when of one rank
  MeshPtr all;
  int64_t replicas = 1, shards = 1, tensor_ranks = 1;
};

ModelMesh model_mesh(const MeshPtr& given) {
  TESSERA_CHECK(given != nullptr, ErrorKind::kShape,
                "[parallel.parallelize_model] no mesh given. Make one with init_device_mesh.");
  ModelMesh out;
  out.all = given;
  const auto size_of = [&](const std::string& name) {
    return out.all->has_dim(name) ? out.all->size(out.all->dim_of(name)) : int64_t{0};
  };
  std::string shard = given->has_dim("dp_shard") || !given->has_dim("dp") ? "dp_shard" : "dp";
  const bool replicated = given->has_dim("dp_replicate"), sharded = given->has_dim(shard);
  TESSERA_CHECK(replicated || sharded || given->has_dim("tp"), ErrorKind::kShape,
                "[parallel.parallelize_model] {} has none of the dims dp_replicate, dp_shard and tp. Name its dims so.",
                given->to_string());
  // A shard dim of one rank where there is none.
  if (!sharded) {
    const std::string last = replicated ? "dp_replicate" : "tp";
    const int64_t size = size_of(last);
    out.all = replicated ? given->unflatten(last, {size, 1}, {last, shard})
                         : given->unflatten(last, {1, size}, {shard, last});
  }
  out.replicas = std::max<int64_t>(size_of("dp_replicate"), 1);
  out.shards = size_of(shard);
  out.tensor_ranks = std::max<int64_t>(size_of("tp"), 1);
  out.data_parallel = out.replicas > 1 ? out.all->slice({"dp_replicate", shard}) : out.all->slice({shard});
  if (out.tensor_ranks > 1) out.tensor_parallel = out.all->slice({"tp"});
  return out;
}

// Projections to keys and values that every rank holds whole.
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
        options.sequence_parallel && !custom && config.num_key_value_heads >= mesh.tensor_ranks, ErrorKind::kConfig,
        "[parallel.parallelize_model] async_tensor_parallel needs sequence_parallel, the family's own plan and a "
        "key-value head for each of {} ranks. Set it to false.",
        mesh.tensor_ranks);
    plan = with_overlap(model, plan);
  }
  if (config.num_key_value_heads < mesh.tensor_ranks) replicate_key_values(plan, config.num_key_value_heads);
  const bool speaks = mesh.all->rank() == mesh.all->ranks().front();
  parallelize_module(model, mesh.tensor_parallel, plan, {.warn_unmatched = custom && speaks});
}

// Embedding and head, where neither has the other's weight.
std::vector<std::pair<nn::Module*, bool>> units_of_vocabulary(nn::Module& model) {
  std::vector<std::pair<nn::Module*, bool>> out;  // and whether it stays gathered after forward
  std::vector<at::Tensor> weights;
  for (const auto& [path, module] : model.named_modules()) {
    const bool head = dynamic_cast<nn::Head*>(module) != nullptr;
    if (!head && dynamic_cast<nn::Embedding*>(module) == nullptr) continue;
    const at::Tensor weight = module->own_parameters().front().parameter;
    for (const auto& other : weights) {
      if (other.is_same(weight)) return {};
    }
    weights.push_back(weight);
    out.emplace_back(module, head);  // the head's backward comes at once
  }
  return out;
}

void shard_units(CausalLM& model, const std::vector<nn::Module*>& layers, const ModelMesh& mesh,
                 const ParallelizeModelOptions& options) {
  FullyShardOptions inner{
      .mesh = mesh.data_parallel, .mp_policy = options.mp_policy, .replicated_over = mesh.tensor_parallel};
  inner.mp_policy.output_dtype.reset();  // they compute in param_dtype and hand it on
  for (auto* layer : layers) fully_shard(*layer, inner);
  for (const auto& [module, stays] : units_of_vocabulary(model)) {
    auto unit = inner;
    if (stays) unit.reshard_after_forward = false;
    fully_shard(*module, unit);
  }
  auto root = inner;
  root.mp_policy = options.mp_policy;
  fully_shard(model, root);
}

}  // namespace

void check_heads(const ModelConfig& config, int64_t tp, bool replicate_kv) {
  const int64_t kv_heads = config.num_key_value_heads, heads = config.num_attention_heads;
  if (kv_heads % tp != 0) {
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
  const auto mesh = model_mesh(options.mesh);
  const bool on_cpu = mesh.all->device_type() == c10::DeviceType::CPU;
  TESSERA_CHECK(!options.cpu_offload || on_cpu, ErrorKind::kConfig,
                "[parallel.parallelize_model] cpu_offload on {}: this version offloads nothing from GPUs. Set "
                "parallel.cpu_offload to false.",
                mesh.all->to_string());
  const bool speaks = mesh.all->rank() == mesh.all->ranks().front();
  if (mesh.tensor_ranks > 1) {
    apply_plan(model, mesh, options);
  } else if (options.sequence_parallel && speaks) {
    log_warning("[parallel.parallelize_model] sequence_parallel is on, but tp is 1: it changes nothing.");
  }
  std::vector<nn::Module*> layers;
  for (const auto& block : model.blocks()) layers.push_back(block.get());
  checkpoint_layers(layers, options.activation_checkpointing);
  if (options.cpu_offload && speaks) {
    log_info("[parallel.parallelize_model] cpu_offload: the mesh is of CPUs, where it changes nothing.");
  }
  if (mesh.tensor_ranks == 1 && mesh.replicas > 1 && mesh.shards == 1) {
    auto replica = options.replicate;
    replica.mesh = mesh.all->slice({"dp_replicate"});
    replica.mp_policy = options.mp_policy;
    return replicate(model, replica);
  }
  shard_units(model, layers, mesh, options);
}

std::shared_ptr<CausalLM> make_parallel_model(const ModelConfig& config, c10::ScalarType dtype,
                                              const ParallelizeModelOptions& options) {
  auto model = make_model(config, {.dtype = dtype, .device = c10::Device(at::kMeta)});
  parallelize_model(*model, options);
  to_empty(*model, options.mesh->device());
  return model;
}

}  // namespace tessera
