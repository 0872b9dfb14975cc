#include <yaml-cpp/yaml.h>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"
#include "tessera/parallel/tensor_parallel/model_plans.h"

namespace tessera {
namespace {

constexpr size_t kMaxPlanBytes = 1 << 20;

[[noreturn]] void refuse_plan(const std::string& plan, const std::string& why) {
  raise(ErrorKind::kConfig,
        "[parallel.plan] {}: {}. A custom plan is one of three: a ParallelPlan (a map from pattern to style), the path "
        "of "
        "a YAML file with such a map, or a function that returns a ParallelPlan.",
        plan, why);
}

Placement parse_layout(const std::string& text, const std::string& where) {
  if (text == "replicate" || text == "R") return Replicate();
  for (const std::string_view prefix : {"shard(", "S("}) {
    if (!text.starts_with(prefix) || !text.ends_with(")")) continue;
    const auto dim = parse_number<int>(std::string_view(text).substr(prefix.size(), text.size() - prefix.size() - 1));
    if (dim && -8 <= *dim && *dim < 8) return Shard(*dim);
  }
  raise(ErrorKind::kConfig, "[parallel.plan] {}: found the layout {}, wanted replicate or shard(DIM).", where,
        quote(text));
}

std::string require_scalar(const YAML::Node& node, const std::string& where) {
  TESSERA_CHECK(node.IsScalar(), ErrorKind::kConfig, "[parallel.plan] {}: found a list or map, wanted a word.", where);
  return node.Scalar();
}

bool parse_boolean(const YAML::Node& node, const std::string& where) {
  const auto text = require_scalar(node, where);
  TESSERA_CHECK(text == "true" || text == "false", ErrorKind::kConfig,
                "[parallel.plan] {}: found {}, wanted true or false.", where, quote(text));
  return text == "true";
}

// Parses a style that is written as a map {style, input, output, local}.
StylePtr style_with_layouts(const YAML::Node& node, const std::string& where) {
  std::string name;
  LayoutOptions options;
  std::optional<bool> local;
  for (const auto& entry : node) {
    const auto key = require_scalar(entry.first, where), path = where + "." + key;
    if (key == "style") {
      name = require_scalar(entry.second, path);
    } else if (key == "input") {
      options.input_layout = parse_layout(require_scalar(entry.second, path), path);
    } else if (key == "output") {
      options.output_layout = parse_layout(require_scalar(entry.second, path), path);
    } else if (key == "local") {
      local = options.use_local_output = parse_boolean(entry.second, path);
    } else {
      raise(ErrorKind::kConfig, "[parallel.plan] {}: unknown key {}. Known: style, input, output, local.", where,
            quote(key));
    }
  }
  if (name == "colwise") return std::make_shared<ColwiseParallel>(options);
  if (name == "rowwise") return std::make_shared<RowwiseParallel>(options);
  const bool has_layouts = options.input_layout || options.output_layout;
  if (name == "sequence_parallel" && !has_layouts) {
    return std::make_shared<SequenceParallel>(SequenceParallelOptions{.use_local_output = local.value_or(false)});
  }
  TESSERA_CHECK(!has_layouts && !local, ErrorKind::kConfig,
                "[parallel.plan] {}: the style {} takes no layouts. Only colwise and rowwise do.", where, quote(name));
  return translate_parallel_style(name);
}

ResolvedPlan hf_plan(const CausalLM& model, bool sequence_parallel) {
  TESSERA_CHECK(!sequence_parallel, ErrorKind::kConfig,
                "[parallel.plan] {}: sequence_parallel is not support in HF tp plan. Set parallel.sequence_parallel to "
                "false, or parallel.plan to auto.",
                model.config().architecture);
  return {.plan = get_hf_tp_plan(model), .custom = false};
}

}  // namespace

ParallelPlan parse_plan(const std::string& yaml, const std::string& name) {
  YAML::Node root;
  try {
    root = YAML::Load(yaml);
  } catch (const YAML::Exception& problem) {
    refuse_plan(name, fmt::format("it is not valid YAML: {}", quote(problem.what())));
  }
  if (!root.IsMap() || root.size() == 0) refuse_plan(name, "found no map from pattern to style in it");
  ParallelPlan plan;
  for (const auto& entry : root) {
    if (!entry.first.IsScalar()) refuse_plan(name, "found a pattern that is not text");
    const auto pattern = entry.first.Scalar();
    const auto where = name + ": " + quote(pattern);
    if (entry.second.IsMap()) {
      plan.set(pattern, style_with_layouts(entry.second, where));
    } else if (entry.second.IsScalar()) {
      plan.set(pattern, translate_parallel_style(entry.second.Scalar()));
    } else {
      refuse_plan(where, "parallel style type should be str, but found another type");
    }
  }
  return plan;
}

PlanChoice parse_plan_choice(const std::string& text) {
  if (text == "auto") return AutoPlan{};
  if (text == "hf") return HfPlan{};
  return PlanFile{text};
}

ResolvedPlan resolve_plan(const CausalLM& model, const PlanChoice& choice, bool sequence_parallel) {
  if (std::holds_alternative<HfPlan>(choice)) return hf_plan(model, sequence_parallel);
  if (std::holds_alternative<AutoPlan>(choice)) {
    const auto found = PARALLIZE_FUNCTIONS().find(model.config().architecture);
    if (found != PARALLIZE_FUNCTIONS().end()) return {.plan = found->second(model, sequence_parallel), .custom = false};
    log_info("[parallel.plan] {} has no plan of its own; using the plan of transformers.", model.config().architecture);
    return hf_plan(model, sequence_parallel);
  }
  if (const auto* plan = std::get_if<ParallelPlan>(&choice)) {
    if (plan->empty()) refuse_plan("the plan given", "it is empty");
    return {.plan = *plan, .custom = true};
  }
  if (const auto* file = std::get_if<PlanFile>(&choice)) {
    std::string text;
    try {
      text = read_file(file->path, kMaxPlanBytes);
    } catch (const Error& problem) {
      refuse_plan(quote(file->path.string()), fmt::format("it cannot be read: {}", problem.what()));
    }
    return {.plan = parse_plan(text, file->path.string()), .custom = true};
  }
  const auto& function = std::get<std::function<ParallelPlan()>>(choice);
  if (!function) refuse_plan("the function given", "it is empty");
  ResolvedPlan resolved{.plan = {}, .custom = true};
  try {
    resolved.plan = function();
  } catch (const std::exception& problem) {
    refuse_plan("the function given", fmt::format("it failed: {}", problem.what()));
  }
  if (resolved.plan.empty()) refuse_plan("the function given", "it returned an empty plan");
  return resolved;
}

}  // namespace tessera
