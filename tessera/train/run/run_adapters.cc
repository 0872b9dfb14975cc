// The adapters of a run: their settings, and descriptions of them (run_setup.h).
#include <fmt/ranges.h>

#include "tessera/base/text/count_text.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/train/run/run_setup.h"

namespace tessera::train {

std::optional<AdapterConfig> adapter_config(const Recipe& recipe) {
  const auto& lora = recipe.lora;
  if (!lora.is_enabled()) return std::nullopt;
  if (!lora.path.empty()) {
    auto config = read_adapter_config(lora.path);
    config.dropout = lora.dropout;
    return config;
  }
  return AdapterConfig{.rank = lora.rank,
                       .alpha = lora.alpha,
                       .dropout = lora.dropout,
                       .rslora = lora.rslora,
                       .dora = lora.dora,
                       .target_modules = lora.target_modules};
}

std::string adapter_identity(const Recipe& recipe) {
  const auto config = adapter_config(recipe);
  if (!config) return "none";
  const auto& lora = recipe.lora;
  const auto base = lora.quantize == "none" ? "" : ", base " + lora.quantize + (lora.double_quant ? " twice" : "");
  return fmt::format("rank {}, alpha {}, targets {}{}{}{}", config->rank, config->alpha,
                     fmt::join(config->target_modules, " "), config->rslora ? ", rslora" : "",
                     config->dora ? ", dora" : "", base);
}

std::string describe_run_adapters(const Recipe& recipe, const ModelConfig& config) {
  const auto adapters = adapter_config(recipe);
  if (!adapters) return "";
  // The parameters are counted on a model with all stages on the meta device, because this rank's model has only its
  // own stages and shards.
  const auto whole = make_model(config, {.device = c10::Device(at::kMeta)});
  add_adapters(*whole, *adapters);
  int64_t trained_elements = 0;
  for (const auto& parameter : whole->parameters()) {
    trained_elements += parameter.requires_grad() ? parameter.numel() : 0;
  }
  return fmt::format("{} parameters in {}", format_count(trained_elements), describe_adapters(*whole));
}

}  // namespace tessera::train
