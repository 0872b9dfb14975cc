// Which styles make a whole model tensor parallel: the plans of its family, transformers' plan, or the user's.
//
//   ParallelPlan plan = PARALLIZE_FUNCTIONS().at("LlamaForCausalLM")(*model, /*sequence_parallel=*/true);
//   ParallelPlan from_transformers = get_hf_tp_plan(*model);
//   ParallelPlan own = resolve_plan(*model, PlanFile{"plan.yaml"}, /*sequence_parallel=*/false).plan;
//
// The families' plans shard vocabulary, heads and the inner width of the MLP, and keep residuals whole, or with
// sequence parallelism along the tokens, as DTensors that know their uneven sizes. What they do beyond NeMo's is in
// docs/design/tensor_parallel.md. No communication. Thread-safe.
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
// By architecture, as in config.json. Upstream's spelling, and ours.
const PlanFunctions& PARALLIZE_FUNCTIONS();
inline const PlanFunctions& parallelize_functions() { return PARALLIZE_FUNCTIONS(); }

// A family's plan with sequence parallelism whose gathers and scatters run in chunks beside the products (asynchronous
// tensor parallelism). Error kConfig for a plan without sequence parallelism.
ParallelPlan with_overlap(const CausalLM& model, const ParallelPlan& plan);

// The style that transformers' plans call so: colwise, rowwise, colwise_rep, rowwise_rep, colwise_gather_output,
// sequence_parallel, replicated_with_grad_allreduce. The same object each time. Error kConfig "Unknown parallel style".
StylePtr translate_parallel_style(std::string_view style);

// The plan of transformers' class and configuration (base_model_tp_plan in config.json comes before that of the class),
// with the embedding sharded by rows, and a head whose logits stay sharded. Styles of experts (ep_router, grouped_gemm,
// packed_colwise and the like) are left out: experts lie over a mesh of their own. Error kConfig where there is none.
ParallelPlan get_hf_tp_plan(const CausalLM& model);

// A file of a plan: a YAML map from pattern to a style as transformers calls it, or to {style, input, output, local},
// whose layouts are "replicate" or "shard(DIM)":
//   model.layers.*.mlp.up_proj: colwise
//   lm_head: {style: colwise, output: shard(-1), local: false}
struct PlanFile {
  std::filesystem::path path;
};
struct AutoPlan {};  // the family's own; transformers' where it has none
struct HfPlan {};    // transformers'
using PlanChoice = std::variant<AutoPlan, HfPlan, ParallelPlan, PlanFile, std::function<ParallelPlan()>>;

struct ResolvedPlan {
  ParallelPlan plan;
  bool custom = false;  // the user's: its patterns without match are worth a warning
};
// Errors kConfig: a custom plan that is empty, cannot be read or whose callable fails, naming the three forms of one;
// sequence parallelism with transformers' plan; a family without any. Of a custom plan sequence_parallel is not asked.
ResolvedPlan resolve_plan(const CausalLM& model, const PlanChoice& choice, bool sequence_parallel);
// "auto", "hf" or the path of a plan file, as a recipe says it.
PlanChoice parse_plan_choice(const std::string& text);
// The plan that the text of such a file says; `name` is what errors call it. Error kConfig.
ParallelPlan parse_plan(const std::string& yaml, const std::string& name);

}  // namespace tessera
