// Tensor-parallel plans for whole models: the plan of the model's family, the plan of transformers, or a custom plan.
//
//   ParallelPlan plan = PARALLIZE_FUNCTIONS().at("LlamaForCausalLM")(*model, /*sequence_parallel=*/true);
//   ParallelPlan from_transformers = get_hf_tp_plan(*model);
//   ParallelPlan own = resolve_plan(*model, PlanFile{"plan.yaml"}, /*sequence_parallel=*/false).plan;
//
// The plans of the families shard the vocabulary, the attention heads and the intermediate size of the MLP. The
// residual stream is replicated, or with sequence parallelism sharded along the sequence, as DTensors, so that shards
// of uneven size are allowed. docs/design/tensor_parallel.md lists the differences from NeMo's plans. No communication.
// Thread-safe.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <variant>

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/parallel/tensor_parallel/styles.h"

namespace tessera {

using PlanFunction = std::function<ParallelPlan(const CausalLM& model, bool sequence_parallel)>;
using PlanFunctions = std::map<std::string, PlanFunction, std::less<>>;
// The plan function of each model family, by the architecture name in config.json. PARALLIZE_FUNCTIONS is spelled as in
// NeMo RL; parallelize_functions() returns the same map.
const PlanFunctions& PARALLIZE_FUNCTIONS();
inline const PlanFunctions& parallelize_functions() { return PARALLIZE_FUNCTIONS(); }

// Returns a copy of a family's sequence-parallel plan with asynchronous tensor parallelism: all-gathers and
// reduce-scatters run in chunks that overlap the matrix products. Error kConfig for a plan without sequence
// parallelism.
ParallelPlan with_overlap(const CausalLM& model, const ParallelPlan& plan);

// Returns the style that has this name in transformers' plans: colwise, rowwise, colwise_rep, rowwise_rep,
// colwise_gather_output, sequence_parallel, replicated_with_grad_allreduce. Returns the same object each time. Error
// kConfig "Unknown parallel style".
StylePtr translate_parallel_style(std::string_view style);

// The plan of transformers: base_model_tp_plan in config.json if it exists, else the plan of the model class. In
// addition the embedding is sharded by rows, and the logits of the head stay sharded. Styles for experts (ep_router,
// grouped_gemm, packed_colwise and similar) are left out, because experts are sharded over a mesh of their own. Error
// kConfig if transformers has no plan for the model.
ParallelPlan get_hf_tp_plan(const CausalLM& model);

// A plan file: a YAML map from a pattern to a style name of transformers, or to {style, input, output, local} with the
// layouts "replicate" or "shard(DIM)":
//   model.layers.*.mlp.up_proj: colwise
//   lm_head: {style: colwise, output: shard(-1), local: false}
struct PlanFile {
  std::filesystem::path path;
};
struct AutoPlan {};  // the family's plan, or transformers' plan for a family without one
struct HfPlan {};    // transformers' plan
using PlanChoice = std::variant<AutoPlan, HfPlan, ParallelPlan, PlanFile, std::function<ParallelPlan()>>;

struct ResolvedPlan {
  ParallelPlan plan;
  bool custom = false;  // a plan of the user; a pattern that matches no module is logged as a warning
};
// Returns the plan for `choice`. sequence_parallel is ignored for a custom plan. Errors kConfig: a custom plan that is
// empty, cannot be read, or comes from a function that fails (the message names the three forms of a custom plan);
// sequence parallelism with transformers' plan; a family without any plan.
ResolvedPlan resolve_plan(const CausalLM& model, const PlanChoice& choice, bool sequence_parallel);
// The choice that a recipe states: "auto", "hf" or the path of a plan file.
PlanChoice parse_plan_choice(const std::string& text);
// Parses the text of a plan file. `name` is the file's name in error messages. Error kConfig.
ParallelPlan parse_plan(const std::string& yaml, const std::string& name);

}  // namespace tessera
