// Tests of the tensor parallel plans of model families, of transformers' tp_plan and of plan files, and of the errors
// for plans that are refused.
#include "tessera/parallel/tensor_parallel/model_plans.h"

#include <gmock/gmock.h>

#include <fstream>

#include "tessera/base/error.h"
#include "tessera/models/config/family.h"
#include "tessera/nn/layers.h"
#include "tessera/parallel/tensor_parallel/parallelize_module.h"
#include "tests/parallel/parallel_families.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

std::shared_ptr<CausalLM> on_meta(const TinyFamily& family) {
  return make_model(config_of(family), {.device = at::kMeta});
}

std::vector<std::string> unmatched(CausalLM& model, const ParallelPlan& plan) {
  std::vector<std::string> out;
  for (const auto& [pattern, style] : plan.entries()) {
    if (match_modules(model, pattern).empty()) out.push_back(pattern);
  }
  return out;
}

TEST(ModelPlans, EveryFamilyMatchesThePatternsOfItsPlan) {
  for (const auto& family : all_families()) {
    const auto model = on_meta(family);
    for (const bool sequences : {false, true}) {
      const auto plan = parallelize_functions().at(family.architecture)(*model, sequences);
      if (family.architecture == "Qwen2ForCausalLM") {
        EXPECT_THAT(unmatched(*model, plan),
                    UnorderedElementsAre("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"));
      } else if (sequences && family.architecture == "Gemma3ForCausalLM") {
        EXPECT_THAT(unmatched(*model, plan), IsEmpty());
      } else {
        EXPECT_THAT(unmatched(*model, plan), IsEmpty()) << family.architecture;
      }
      // Every linear layer has a style, so that no plain module computes on shards.
      for (const auto& [path, module] : model->named_modules()) {
        const bool product = dynamic_cast<nn::Linear*>(module) != nullptr;
        bool styled = false;
        for (const auto& [pattern, style] : plan.entries()) {
          for (const auto& [name, matched] : match_modules(*model, pattern)) styled = styled || matched == module;
        }
        EXPECT_TRUE(styled || !product) << path;
      }
    }
  }
  EXPECT_TRUE(PARALLIZE_FUNCTIONS().contains("Gemma3ForConditionalGeneration"));
  EXPECT_EQ(PARALLIZE_FUNCTIONS().size(), model_families().size());
}

TEST(ModelPlans, EqualNeMosPlans) {
  const auto model = on_meta({"LlamaForCausalLM"});
  const auto style_of = [&](bool sequences, const std::string& pattern) {
    const auto plan = PARALLIZE_FUNCTIONS().at("LlamaForCausalLM")(*model, sequences);
    const auto* style = plan.find(pattern);
    return style == nullptr ? std::string("none") : style->describe();
  };
  const std::string layer = "model.layers.*.";
  EXPECT_EQ(style_of(false, "model.embed_tokens"), "RowwiseParallel(R -> R, local)");
  EXPECT_EQ(style_of(false, layer + "self_attn.q_proj"), "ColwiseParallel(R -> S(-1), local)");
  EXPECT_EQ(style_of(false, layer + "mlp.down_proj"), "RowwiseParallel(S(-1) -> R, local)");
  EXPECT_EQ(style_of(false, "lm_head"), "ColwiseParallel(R -> S(-1))");
  EXPECT_EQ(style_of(false, "model.norm"), "none");
  EXPECT_EQ(style_of(true, "model.embed_tokens"), "RowwiseParallel(R -> S(1))");
  EXPECT_EQ(style_of(true, layer + "self_attn.o_proj"), "RowwiseParallel(S(-1) -> S(1))");
  EXPECT_EQ(style_of(true, layer + "input_layernorm"), "SequenceParallelAllGatherActivation(dim 1)");
  EXPECT_EQ(style_of(true, "model.norm"), "SequenceParallel(dim 1)");
  EXPECT_EQ(style_of(true, "model.rotary_emb"), "none");
  EXPECT_EQ(style_of(true, "lm_head"), "ColwiseParallel(S(1) -> S(-1))");
}

TEST(TranslateParallelStyle, KnowsTransformersNames) {
  const std::map<std::string, std::string> wanted = {
      {"colwise", "ColwiseParallel(R -> S(-1), local)"},   {"rowwise", "RowwiseParallel(S(-1) -> R, local)"},
      {"colwise_rep", "ColwiseParallel(R -> R, local)"},   {"colwise_gather_output", "ColwiseParallel(R -> R, local)"},
      {"rowwise_rep", "RowwiseParallel(R -> R, local)"},   {"sequence_parallel", "SequenceParallel(dim 1)"},
      {"replicated_with_grad_allreduce", "QKNormParallel"}};
  for (const auto& [name, style] : wanted) {
    EXPECT_EQ(translate_parallel_style(name)->describe(), style);
    EXPECT_EQ(translate_parallel_style(name), translate_parallel_style(name)) << "one object";
  }
  EXPECT_THAT(error_of([] { translate_parallel_style("local_rowwise"); }),
              AllOf(HasSubstr("Unknown parallel style: local_rowwise"), HasSubstr("colwise_rep")));
}

TEST(HfTpPlan, CombinesThePlansOfClassAndConfig) {
  const auto plan = get_hf_tp_plan(*on_meta({"Qwen3ForCausalLM"}));
  EXPECT_EQ(plan.find("lm_head")->describe(), "ColwiseParallel(R -> S(-1))") << "logits stay sharded";
  EXPECT_EQ(plan.find("model.embed_tokens")->describe(), "RowwiseParallel(R -> R, local)");
  EXPECT_EQ(plan.find("model.layers.*.self_attn.q_norm")->describe(), "QKNormParallel");
  EXPECT_EQ(plan.entries().size(), 11);
  TinyFamily own{"LlamaForCausalLM"};
  own.more = R"(, "base_model_tp_plan": {"layers.*.mlp.up_proj": "colwise", "embed_tokens": "colwise_rep"})";
  const auto changed = get_hf_tp_plan(*on_meta(own));
  std::vector<std::string> patterns;
  for (const auto& [pattern, style] : changed.entries()) patterns.push_back(pattern);
  EXPECT_THAT(patterns, ElementsAre("lm_head", "model.layers.*.mlp.up_proj", "model.embed_tokens"));
  own.more = R"(, "base_model_tp_plan": {"layers.*.mlp.up_proj": "sideways"})";
  EXPECT_THAT(error_of([&] { get_hf_tp_plan(*on_meta(own)); }), HasSubstr("Unknown parallel style: sideways"));
  own.more = R"(, "base_model_tp_plan": {"layers.*.mlp.up_proj": 3})";
  EXPECT_THAT(error_of([&] { get_hf_tp_plan(*on_meta(own)); }), HasSubstr("should be str, but found number"));
}

// The plan that transformers 5 has for Qwen3-MoE.
TEST(HfTpPlan, OmitsExpertEntries) {
  TinyFamily moe{"Qwen3MoeForCausalLM"};
  moe.more = R"(, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "base_model_tp_plan": {
      "layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
      "layers.*.mlp.experts": "moe_tp_experts", "layers.*.mlp.gate": "ep_router", "layers.*.self_attn.o_proj":
      "rowwise"})";
  std::vector<std::string> patterns;
  const auto plan = get_hf_tp_plan(*on_meta(moe));
  for (const auto& [pattern, style] : plan.entries()) patterns.push_back(pattern);
  EXPECT_THAT(patterns, UnorderedElementsAre("lm_head", "model.layers.*.self_attn.q_proj",
                                             "model.layers.*.self_attn.o_proj", "model.embed_tokens"));
}

TEST(PlanChoice, ReadsFiles) {
  const TempFolder folder;
  const auto path = folder.path() / "plan.yaml";
  std::ofstream(path) << "model.layers.*.mlp.up_proj: colwise\n"
                         "model.norm: {style: sequence_parallel, local: true}\n"
                         "lm_head: {style: colwise, input: replicate, output: shard(-1), local: false}\n";
  const auto model = on_meta({"LlamaForCausalLM"});
  const auto resolved = resolve_plan(*model, parse_plan_choice(path.string()), /*sequence_parallel=*/true);
  EXPECT_TRUE(resolved.custom);
  EXPECT_EQ(resolved.plan.find("lm_head")->describe(), "ColwiseParallel(R -> S(-1))");
  EXPECT_EQ(resolved.plan.find("model.norm")->describe(), "SequenceParallel(dim 1, local)");
  EXPECT_EQ(resolved.plan.find("model.layers.*.mlp.up_proj")->describe(), "ColwiseParallel(R -> S(-1), local)");
}

TEST(PlanChoice, EveryErrorNamesTheThreeForms) {
  const auto model = on_meta({"LlamaForCausalLM"});
  const auto refusal = [&](const PlanChoice& choice) { return error_of([&] { resolve_plan(*model, choice, false); }); };
  const auto forms = AllOf(HasSubstr("ParallelPlan (a map"), HasSubstr("YAML file"), HasSubstr("function"));
  EXPECT_THAT(refusal(PlanFile{"/nowhere/plan.yaml"}), forms);
  EXPECT_THAT(refusal(ParallelPlan{}), forms);
  EXPECT_THAT(refusal(std::function<ParallelPlan()>()), forms);
  EXPECT_THAT(refusal(std::function<ParallelPlan()>([] { return ParallelPlan(); })), forms);
  EXPECT_THAT(refusal(std::function<ParallelPlan()>([]() -> ParallelPlan { throw std::runtime_error("no idea"); })),
              AllOf(forms, HasSubstr("no idea")));
  for (const char* text : {"", "- a\n- b", "a: [b]", "plain", "a: {b: c", "? {a: b}\n: colwise"}) {
    EXPECT_THAT(error_of([&] { parse_plan(text, "plan.yaml"); }), AllOf(forms, HasSubstr("plan.yaml"))) << text;
  }
  EXPECT_THAT(error_of([] { parse_plan("a: sideways", "p"); }), HasSubstr("Unknown parallel style: sideways"));
  EXPECT_THAT(error_of([] { parse_plan("a: {style: colwise, output: shard(x)}", "p"); }), HasSubstr("shard(DIM)"));
  EXPECT_THAT(error_of([] { parse_plan("a: {style: colwise, inputs: R}", "p"); }), HasSubstr("unknown key 'inputs'"));
  EXPECT_THAT(error_of([] { parse_plan("a: {style: colwise_rep, input: R}", "p"); }), HasSubstr("takes no layouts"));
}

TEST(ParallelPlan, KeepsInsertionOrder) {
  ParallelPlan plan{{"a", translate_parallel_style("colwise")}, {"b", translate_parallel_style("rowwise")}};
  plan.update({{"c", translate_parallel_style("rowwise")}, {"a", translate_parallel_style("rowwise")}});
  std::vector<std::string> patterns;
  for (const auto& [pattern, style] : plan.entries()) patterns.push_back(pattern);
  EXPECT_THAT(patterns, ElementsAre("a", "b", "c"));
  EXPECT_EQ(plan.find("a")->describe(), "RowwiseParallel(S(-1) -> R, local)");
  plan.erase("b");
  EXPECT_EQ(plan.find("b"), nullptr);
}

TEST(CheckHeads, ComparesKeyValueHeadsFirst) {
  auto config = config_of({"LlamaForCausalLM", 6, 2});
  check_heads(config, 2, false);
  check_heads(config, 6, true);
  EXPECT_THAT(error_of([&] { check_heads(config, 4, true); }), HasSubstr("num_attention_heads (6)"));
  EXPECT_THAT(error_of([&] { check_heads(config, 4, false); }), HasSubstr("num_key_value_heads (2)"));
  EXPECT_THAT(error_of([&] { check_heads(config, 3, true); }), HasSubstr("num_key_value_heads (2)"));
}

}  // namespace
}  // namespace tessera::testing
