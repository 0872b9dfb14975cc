#include "tessera/models/adapters/adapters.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/philox.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/random/random_fill.h"
#include "tessera/models/tensors/model_parameters.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera {
namespace {

constexpr const char* kAllLinear = "all-linear";
constexpr size_t kLongestPattern = 1000;

bool is_module_name(std::string_view text) {
  return !text.empty() &&
         std::ranges::all_of(text, [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '.'; });
}

// Whether `name` is `module`, or ends in ".module".
bool matches_module(const std::string& name, const std::string& module) {
  return name == module || name.ends_with("." + module);
}

// One entry of target_modules.
class AdapterTarget {
 public:
  AdapterTarget(std::string text, TargetSyntax syntax)
      : text_(std::move(text)), all_(syntax == TargetSyntax::kRecipe && text_ == kAllLinear) {
    const bool is_pattern =
        syntax == TargetSyntax::kPeftPattern || (syntax == TargetSyntax::kRecipe && !all_ && !is_module_name(text_));
    if (!is_pattern) return;
    TESSERA_CHECK(text_.size() <= kLongestPattern, ErrorKind::kConfig,
                  "[models.adapters] target_modules: {} has {} characters, wanted {} at most", quote(text_),
                  text_.size(), kLongestPattern);
    try {
      // __polynomial makes matching take time linear in the text for every pattern. It does not support back
      // references.
      pattern_.emplace(text_, std::regex::ECMAScript | std::regex_constants::__polynomial);
    } catch (const std::regex_error&) {
      raise(
          ErrorKind::kConfig,
          "[models.adapters] target_modules: {} is {}no regular expression of this version (ECMAScript's, without back "
          "references). Write names of Linears, or all-linear.",
          quote(text_), syntax == TargetSyntax::kPeftPattern ? "" : "no name and ");
    }
  }
  bool matches(const std::string& path) const {
    if (all_) return true;
    if (pattern_) return std::regex_match(path, *pattern_);
    return matches_module(path, text_);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
  bool all_;
  std::optional<std::regex> pattern_;
};

struct LinearSlot {
  std::string path, name;
  nn::Module* parent;
  nn::Linear* linear;
};

void collect_linears(nn::Module& module, const std::string& path, std::vector<LinearSlot>& out) {
  for (const auto& [name, child] : module.named_children()) {
    const std::string below = path.empty() ? name : path + "." + name;
    if (auto* linear = dynamic_cast<nn::Linear*>(child.get())) {
      out.push_back({below, name, &module, linear});
    } else {
      collect_linears(*child, below, out);
    }
  }
}

// Returns every Linear that at least one entry of target_modules names. An entry that names no Linear of this model is
// an error. Exception: a list of names from PEFT's file (TargetSyntax::kPeftNames) may also contain names of other
// models; it is enough that one of its entries names a Linear of this model.
std::vector<LinearSlot> find_target_linears(CausalLM& model, const AdapterConfig& config) {
  std::vector<LinearSlot> all, targeted;
  collect_linears(model, "", all);
  std::vector<AdapterTarget> targets;
  for (const auto& text : config.target_modules) targets.emplace_back(text, config.target_syntax);
  TESSERA_CHECK(!targets.empty(), ErrorKind::kConfig,
                "[models.adapters] target_modules: the list is empty, wanted names "
                "of Linears, or all-linear");
  std::vector<bool> used(targets.size());
  for (const auto& slot : all) {
    bool is_target = false;
    for (size_t i = 0; i < targets.size(); ++i) {
      if (!targets[i].matches(slot.path)) continue;
      is_target = used[i] = true;
    }
    if (is_target) targeted.push_back(slot);
  }
  std::set<std::string> names;
  for (const auto& slot : all) names.insert(slot.name);
  const bool ignores_unknown_names = config.target_syntax == TargetSyntax::kPeftNames && !targeted.empty();
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto& text = targets[i].text();
    TESSERA_CHECK(used[i] || (!matches_module(text, "lm_head") && !matches_module(text, "embed_tokens")),
                  ErrorKind::kConfig,
                  "[models.adapters] target_modules: {}: this version has no adapters on embedding and head. Leave it "
                  "out; an adapter that has it can be merged with PEFT (merge_and_unload).",
                  quote(text));
    TESSERA_CHECK(
        used[i] || ignores_unknown_names, ErrorKind::kConfig,
        "[models.adapters] target_modules: {} {}. Its Linears are called {}.", quote(text),
        config.target_syntax == TargetSyntax::kPeftPattern
            ? "is read as a regular expression, because it is a text and not a list, and matches the whole path "
              "of no Linear of this model"
            : "is not a Linear of this model",
        fmt::join(names, ", "));
  }
  return targeted;
}

void check_adapter_config(const AdapterConfig& config) {
  TESSERA_CHECK(config.rank >= 1 && config.rank <= (int64_t{1} << 20), ErrorKind::kConfig,
                "[models.adapters] rank: found {}, wanted 1 to {}", config.rank, int64_t{1} << 20);
  TESSERA_CHECK(std::isfinite(config.alpha) && config.alpha > 0, ErrorKind::kConfig,
                "[models.adapters] alpha: found {}, wanted above 0", config.alpha);
  TESSERA_CHECK(config.dropout >= 0 && config.dropout < 1, ErrorKind::kConfig,
                "[models.adapters] dropout: found {}, wanted 0 up to 1", config.dropout);
}

// Fills this rank's shard with values that depend only on the seed, the parameter's name and the global index of an
// element, so the result is the same for every sharding.
void fill_uniform(SharedParameter& parameter, uint64_t seed) {
  const auto local = writable_local_shard(parameter, c10::Device(c10::DeviceType::CPU));
  const auto& whole = parameter.tensor;
  const auto region = is_dtensor(whole) ? tessera::ShardRegion(whole.sizes(), *device_mesh(whole), placements(whole))
                                        : tessera::ShardRegion(whole.sizes());
  const double bound = 1 / std::sqrt(static_cast<double>(whole.size(1)));
  const auto drawn = at::empty(local.sizes(), at::kFloat);
  tessera::fill_random(drawn, region, {.seed = seed, .operation = philox_stream(parameter.names.front())},
                       {.kind = tessera::DistributionKind::kUniform, .a = -bound, .b = bound});
  local.copy_(drawn);
}

// Returns "model.layers.3" for "model.layers.3.mlp.up_proj", or the whole path of a module outside layers.
std::string layer_of(const std::string& path) {
  constexpr std::string_view kLayers = ".layers.";
  const size_t begin = path.find(kLayers);
  return begin == path.npos ? path : path.substr(0, path.find('.', begin + kLayers.size()));
}

at::Tensor full_value(const at::Tensor& parameter) {
  return is_dtensor(parameter) ? full_tensor(parameter.detach()) : parameter.detach();
}

}  // namespace

std::vector<std::string> add_adapters(CausalLM& model, const AdapterConfig& config, c10::ScalarType dtype) {
  check_adapter_config(config);
  TESSERA_CHECK(adapted_linears(model).empty(), ErrorKind::kConfig,
                "[models.adapters] the model has adapters already. Add them once.");
  const auto slots = find_target_linears(model, config);
  model.set_requires_grad(false);
  std::shared_ptr<nn::LoraDropout> dropout;
  if (config.dropout > 0) {
    dropout = std::make_shared<nn::LoraDropout>(nn::LoraDropout{.probability = config.dropout});
    // All adapters share one LoraDropout. At the start of each training forward, this hook tells the LoraDropout the
    // number of rows of the batch.
    model.register_forward_pre_hook([dropout](nn::Module& of, nn::TensorRefs& inputs) {
      if (of.training() && !inputs.empty() && inputs[0]->defined()) dropout->begin_call(inputs[0]->size(0));
    });
  }
  std::vector<std::string> paths;
  for (const auto& slot : slots) {
    slot.parent->replace_child(slot.name,
                               std::make_shared<nn::LoraLinear>(*slot.linear, nn::LoraSettings{.rank = config.rank,
                                                                                               .alpha = config.alpha,
                                                                                               .rslora = config.rslora,
                                                                                               .dora = config.dora,
                                                                                               .dropout = dropout,
                                                                                               .path = slot.path,
                                                                                               .dtype = dtype}));
    paths.push_back(slot.path);
  }
  return paths;
}

AdaptedLinears adapted_linears(nn::Module& model) {
  AdaptedLinears out;
  for (const auto& [path, module] : model.named_modules()) {
    if (auto* linear = dynamic_cast<nn::LoraLinear*>(module)) out.emplace_back(path, linear);
  }
  return out;
}

std::string describe_adapters(CausalLM& model) {
  std::vector<std::string> names;  // in the model's order
  std::set<std::string> layers;
  const auto linears = adapted_linears(model);
  for (const auto& [path, linear] : linears) {
    const size_t last = path.rfind('.');
    const auto name = path.substr(last + 1);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    layers.insert(layer_of(path));
  }
  const auto& config = model.config();
  const auto all = static_cast<size_t>(config.num_hidden_layers);
  return fmt::format("{} of {} layers{}{}", fmt::join(names, ", "),
                     layers.size() == all ? fmt::format("{}", all) : fmt::format("{} of {}", layers.size(), all),
                     linears.size() == names.size() * layers.size() ? "" : ", not all of them in each",
                     config.experts.num_experts > 0 ? "; experts and router stay frozen" : "");
}

std::shared_ptr<nn::LoraDropout> adapter_dropout(CausalLM& model) {
  const auto linears = adapted_linears(model);
  return linears.empty() ? nullptr : linears.front().second->settings().dropout;
}

void init_adapters(CausalLM& model, uint64_t seed) {
  const c10::NoGradGuard no_grad;
  for (auto& parameter : shared_parameters(model, ParameterSet::kOfAdapters)) {
    const auto& name = parameter.names.front();
    if (name.ends_with(".lora_A.weight")) {
      fill_uniform(parameter, seed);
    } else if (name.ends_with(".lora_B.weight")) {
      writable_local_shard(parameter, c10::Device(c10::DeviceType::CPU)).zero_();
    }
  }
  for (const auto& [path, linear] : adapted_linears(model)) {
    if (!linear->lora_magnitude_vector) continue;
    // The base weight must be loaded, because DoRA's magnitudes start as the norms of its rows.
    const bool is_packed = linear->packed != nullptr;
    TESSERA_CHECK(is_packed ? linear->packed->weight.defined() : !linear->own_parameters().front().parameter.is_meta(),
                  ErrorKind::kConfig,
                  "[models.adapters] {}: DoRA's magnitudes begin as the norms of its rows, and it has no values yet. "
                  "Load the base first.",
                  path);
    // Read the registered parameter, not the member `weight`: under FSDP the member has no values between forward
    // passes.
    const at::Tensor base = is_packed ? linear->base_weight() : linear->own_parameters().front().parameter;
    const auto norms = full_value(base).to(at::kFloat).square().sum(1).sqrt();
    for (auto& parameter : shared_parameters(*linear->lora_magnitude_vector, ParameterSet::kOfAdapters)) {
      const auto local = writable_local_shard(parameter, base.device());
      const auto box = local_shard_box(parameter.tensor);
      local.copy_(norms.narrow(0, local.numel() == 0 ? 0 : box.offset[0], local.numel()));
    }
  }
}

// Every rank gathers A, B and the magnitude and computes the same merged weight.
at::Tensor merged_weight(nn::LoraLinear& linear, const at::Tensor& whole) {
  const c10::NoGradGuard no_grad;
  const auto of = [](nn::Module& part) { return full_value(part.own_parameters().front().parameter); };
  const at::Tensor a = of(*linear.lora_A), b = of(*linear.lora_B);
  const at::Tensor magnitude = linear.lora_magnitude_vector ? of(*linear.lora_magnitude_vector) : at::Tensor();
  return nn::LoraLinear::merged(whole, a, b, magnitude, linear.scaling());
}

}  // namespace tessera
