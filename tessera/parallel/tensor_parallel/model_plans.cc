#include "tessera/parallel/tensor_parallel/model_plans.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/models/config/family.h"

namespace tessera {
namespace {

const LayoutOptions kVocabRows{.input_layout = Replicate()};
const LayoutOptions kShardedLogits{.output_layout = Shard(-1), .use_local_output = false};

std::string decoder_prefix(const CausalLM& model) {
  return std::string(family_of(model.config().architecture).plan.base_module);
}

// The plan with a replicated residual stream. The input of attention and of the MLP becomes a DTensor once for all
// projections that read it, so its gradient is all-reduced once.
ParallelPlan base_plan(const std::string& inner, bool head_norms) {
  const std::string layer = inner + ".layers.*.";
  const auto whole_input = std::make_shared<PrepareModuleInput>(PrepareModuleInputOptions{
      .input_layouts = {Replicate()}, .desired_input_layouts = {Replicate()}, .leave_others = true});
  const auto columns = std::make_shared<ColwiseParallel>();
  const auto rows = std::make_shared<RowwiseParallel>();
  ParallelPlan plan;
  plan.set(inner + ".embed_tokens", std::make_shared<RowwiseParallel>(kVocabRows));
  plan.set(layer + "self_attn", whole_input);
  for (const char* name : {"q_proj", "k_proj", "v_proj"}) plan.set(layer + "self_attn." + name, columns);
  if (head_norms) {
    for (const char* name : {"q_norm", "k_norm"}) {
      plan.set(layer + "self_attn." + name, std::make_shared<QKNormParallel>());
    }
  }
  plan.set(layer + "self_attn.o_proj", rows);
  plan.set(layer + "mlp", whole_input);
  for (const char* name : {"up_proj", "gate_proj"}) plan.set(layer + "mlp." + name, columns);
  plan.set(layer + "mlp.down_proj", rows);
  plan.set("lm_head", std::make_shared<ColwiseParallel>(kShardedLogits));
  return plan;
}

// The differences between the families' plans.
struct PlanShape {
  bool head_norms = false;  // q_norm and k_norm
  // Names of modules to which add_sequence_parallelism() gives a style: norms whose output is all-gathered because it
  // is the input of projections; the other norms of a layer; the rotary embeddings.
  std::vector<std::string> gathering_norms{};
  std::vector<std::string> other_norms{};
  std::vector<std::string> rotary{};
};

// Turns base_plan into sequence parallelism: the row-wise projections reduce-scatter to Shard(1) instead of
// all-reducing, norms run on sequence shards, and the norms before projections all-gather. The input styles of
// attention and MLP are removed, because their inputs are already replicated DTensors.
void add_sequence_parallelism(ParallelPlan& plan, const std::string& inner, const PlanShape& shape) {
  const std::string layer = inner + ".layers.*.";
  const auto scattered_rows =
      std::make_shared<RowwiseParallel>(LayoutOptions{.output_layout = Shard(1), .use_local_output = false});
  plan.erase(layer + "self_attn");
  plan.erase(layer + "mlp");
  plan.set(inner + ".embed_tokens",
           std::make_shared<RowwiseParallel>(
               LayoutOptions{.input_layout = Replicate(), .output_layout = Shard(1), .use_local_output = false}));
  plan.set(inner + ".norm", std::make_shared<SequenceParallel>());
  for (const auto& name : shape.gathering_norms) {
    plan.set(layer + name, std::make_shared<SequenceParallelAllGatherActivation>());
  }
  for (const auto& name : shape.other_norms) plan.set(layer + name, std::make_shared<SequenceParallel>());
  plan.set(layer + "self_attn.o_proj", scattered_rows);
  plan.set(layer + "mlp.down_proj", scattered_rows);
  plan.set("lm_head", std::make_shared<ColwiseParallel>(LayoutOptions{
                          .input_layout = Shard(1), .output_layout = Shard(-1), .use_local_output = false}));
  for (const auto& name : shape.rotary) {
    plan.set(inner + "." + name,
             std::make_shared<RotaryEmbedParallel>(SequenceParallelOptions{.use_local_output = true}));
  }
}

PlanFunction plan_of_shape(PlanShape shape) {
  return [shape = std::move(shape)](const CausalLM& model, bool sequence_parallel) {
    const auto inner = decoder_prefix(model);
    auto plan = base_plan(inner, shape.head_norms);
    if (sequence_parallel) add_sequence_parallelism(plan, inner, shape);
    return plan;
  };
}

PlanFunctions make_plan_functions() {
  const std::vector<std::string> around = {"input_layernorm", "post_attention_layernorm"};
  const std::map<std::string_view, PlanShape> shapes = {
      {"llama", {.gathering_norms = around}},
      {"qwen", {.head_norms = true, .gathering_norms = around, .rotary = {"rotary_emb"}}},
      {"qwen_moe",  // experts take the sequence shard of their rank
       {.head_norms = true,
        .gathering_norms = {"input_layernorm"},
        .other_norms = {"post_attention_layernorm"},
        .rotary = {"rotary_emb"}}},
      {"gemma3",
       {.head_norms = true,
        .gathering_norms = {"input_layernorm", "pre_feedforward_layernorm"},
        .other_norms = {"post_attention_layernorm", "post_feedforward_layernorm"},
        .rotary = {"rotary_emb", "rotary_emb_local"}}}};
  PlanFunctions functions;
  for (const auto* family : model_families()) {
    const auto found = shapes.find(family->plan.name);
    if (found != shapes.end()) functions.emplace(family->architecture, plan_of_shape(found->second));
  }
  return functions;
}

const std::map<std::string, StylePtr, std::less<>>& known_styles() {
  static const std::map<std::string, StylePtr, std::less<>> styles = {
      {"colwise", std::make_shared<ColwiseParallel>()},
      {"rowwise", std::make_shared<RowwiseParallel>()},
      {"colwise_rep", std::make_shared<ColwiseParallel>(LayoutOptions{.output_layout = Replicate()})},
      {"colwise_gather_output", std::make_shared<ColwiseParallel>(LayoutOptions{.output_layout = Replicate()})},
      {"rowwise_rep", std::make_shared<RowwiseParallel>(kVocabRows)},
      {"sequence_parallel", std::make_shared<SequenceParallel>()},
      {"replicated_with_grad_allreduce", std::make_shared<QKNormParallel>()}};
  return styles;
}

// Whether a style name of transformers' plans is a style for experts, which parallel/experts shards over a separate
// mesh.
bool is_expert_style(std::string_view style) {
  static const std::set<std::string_view> known = {
      "grouped_gemm", "moe_tp_experts", "moe_identity_expert", "packed_colwise", "packed_rowwise", "local", "gather"};
  return known.contains(style) || style.starts_with("ep_") || style.starts_with("local_");
}

// base_model_tp_plan and tp_plan of config.json, as (pattern, style name).
std::vector<std::pair<std::string, std::string>> plan_in_config(const ModelConfig& config) {
  std::vector<std::pair<std::string, std::string>> out;
  const auto text = config.to_json(config.dtype.value_or(at::kFloat));
  const auto source = parse_json_object(text, "[parallel.plan] config.json");
  for (const char* key : {"base_model_tp_plan", "tp_plan"}) {
    if (!source.contains(key) || !source[key].is_object()) continue;
    for (const auto& [pattern, style] : source[key].items()) {
      TESSERA_CHECK(style.is_string(), ErrorKind::kConfig,
                    "[parallel.plan] config.json: {}.{}: parallel style type should be str, but found {}.", key,
                    pattern, style.type_name());
      out.emplace_back(pattern, style.get<std::string>());
    }
  }
  return out;
}

}  // namespace

const PlanFunctions& PARALLIZE_FUNCTIONS() {
  static const PlanFunctions functions = make_plan_functions();
  return functions;
}

// Each block (attention, MLP) gets one OverlappedBlock instead of the styles of its projections. The norms before the
// blocks no longer all-gather, because the block gathers in chunks.
ParallelPlan with_overlap(const CausalLM& model, const ParallelPlan& plan) {
  const std::string layer = decoder_prefix(model) + ".layers.*.";
  ParallelPlan out = plan;
  bool gathered = false;
  for (const auto& [pattern, style] : plan.entries()) {
    if (dynamic_cast<const SequenceParallelAllGatherActivation*>(style.get()) == nullptr) continue;
    gathered = true;
    out.set(pattern, std::make_shared<SequenceParallel>());  // OverlappedBlock all-gathers
  }
  TESSERA_CHECK(gathered, ErrorKind::kConfig,
                "[parallel.plan] asynchronous tensor parallelism needs a plan with sequence parallelism.");
  const auto overlap = [&](const std::string& block, const std::vector<std::string>& columns, const std::string& rows) {
    for (const auto& name : columns) out.erase(layer + block + "." + name);
    out.erase(layer + block + "." + rows);
    out.set(layer + block,
            std::make_shared<OverlappedBlock>(OverlappedBlockOptions{.gathered = columns, .scattered = rows}));
  };
  overlap("self_attn", {"q_proj", "k_proj", "v_proj"}, "o_proj");
  overlap("mlp", {"gate_proj", "up_proj"}, "down_proj");
  return out;
}

StylePtr translate_parallel_style(std::string_view style) {
  const auto found = known_styles().find(style);
  if (found != known_styles().end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [name, known] : known_styles()) names.push_back(name);
  raise(ErrorKind::kConfig, "[parallel.plan] Unknown parallel style: {}. Known: {}.", style, fmt::join(names, ", "));
}

// transformers' patterns are relative to the decoder, the plan's patterns to the model. Where transformers gathers the
// logits, they stay sharded here over the vocabulary, because the loss reads sharded logits.
ParallelPlan get_hf_tp_plan(const CausalLM& model) {
  const auto& config = model.config();
  const auto& keys = family_of(config.architecture).plan;
  const std::string inner(keys.base_module);
  std::vector<std::pair<std::string, std::string>> styles;
  for (const auto& [pattern, style] : keys.top) styles.emplace_back(pattern, style);
  const auto from_config = plan_in_config(config);
  if (!from_config.empty()) {
    for (const auto& [pattern, style] : from_config) styles.emplace_back(inner + "." + pattern, style);
  } else {
    for (const auto& [pattern, style] : keys.layers) styles.emplace_back(inner + "." + std::string(pattern), style);
  }
  TESSERA_CHECK(
      !styles.empty(), ErrorKind::kConfig,
      "[parallel.plan] {}: transformers has no tensor-parallel plan for it. Set parallel.tp to 1, or give a plan "
      "of your own.",
      config.architecture);
  ParallelPlan plan;
  for (const auto& [pattern, style] : styles) {
    if (config.experts.num_experts > 0 && is_expert_style(style)) continue;
    const bool head = pattern == "lm_head" || pattern == "language_model.lm_head";
    const bool gathers = style == "colwise_rep" || style == "colwise_gather_output";
    plan.set(pattern,
             head && gathers ? std::make_shared<ColwiseParallel>(kShardedLogits) : translate_parallel_style(style));
  }
  const auto embedding = inner + ".embed_tokens";
  if (!plan.find(embedding)) plan.set(embedding, translate_parallel_style("rowwise_rep"));
  return plan;
}

}  // namespace tessera
