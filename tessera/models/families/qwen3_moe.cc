// Qwen3-MoE: a Qwen3 in which all or some layers have experts in place of the MLP.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/models/families/families.h"

namespace tessera {
namespace {

constexpr int64_t kMostExperts = 1 << 12;
constexpr int64_t kMostElements = int64_t{1} << 40;  // elements of the stacked experts of one layer

std::shared_ptr<CausalLM> make_qwen3_moe(const ModelConfig& config, const nn::ParameterOptions& options) {
  // All layers share one statistics object, because the load-balancing loss is computed over the layers together.
  const auto& experts = config.experts;
  const auto statistics = std::make_shared<nn::RouterStatistics>(experts.num_experts, experts.balance_coefficient);
  const auto layer = [&](int64_t index) {
    auto attention = attention_options(config, index);
    attention.qk_norm = nn::NormOptions{.eps = config.rms_norm_eps};
    auto made = std::make_shared<DecoderLayer>(attention, config, options);
    if (made->moe) made->moe->gate->statistics = statistics;
    return made;
  };
  return std::make_shared<DecoderForCausalLM>(config, DecoderParts{.layer = layer}, options);
}

// Returns for each layer whether it has experts. Every decoder_sparse_step-th layer has experts, unless mlp_only_layers
// lists it; all other layers have an MLP.
std::vector<bool> layers_with_experts(const JsonReader& in, int64_t layers) {
  const int64_t step = in.integer("decoder_sparse_step", 1, 1, kMostExperts);
  const auto dense = in.integers("mlp_only_layers", 0, kMostExperts);
  std::vector<bool> out;
  for (int64_t i = 0; i < layers; ++i) out.push_back((i + 1) % step == 0 && std::ranges::find(dense, i) == dense.end());
  return out;
}

void read_expert_keys(const JsonReader& in, const JsonReader& /*top*/, ModelConfig& config) {
  auto& experts = config.experts;
  // When a file has both num_experts and num_local_experts, transformers uses num_local_experts.
  const char* key = in.has("num_local_experts") ? "num_local_experts" : "num_experts";
  experts.num_experts = in.integer(key, 128, 0, kMostExperts);
  experts.intermediate_size = in.integer("moe_intermediate_size", 768, 1, int64_t{1} << 31);
  experts.norm_topk_prob = in.boolean("norm_topk_prob", false);
  experts.adds_balance_loss = in.boolean("output_router_logits", false);
  experts.balance_coefficient = in.number("router_aux_loss_coef", 0.001, 0, 1e6);
  if (experts.num_experts == 0) return;
  experts.num_experts_per_tok = in.integer("num_experts_per_tok", 8, 1, kMostExperts);
  TESSERA_CHECK(experts.num_experts_per_tok <= experts.num_experts, ErrorKind::kConfig,
                "{}: num_experts_per_tok {} is more than the {} experts", in.name(), experts.num_experts_per_tok,
                experts.num_experts);
  TESSERA_CHECK(experts.intermediate_size <= kMostElements / config.hidden_size / experts.num_experts / 2,
                ErrorKind::kConfig, "{}: {} experts of {} x {} are too large: at most {} elements", in.name(),
                experts.num_experts, 2 * experts.intermediate_size, config.hidden_size, kMostElements);
  experts.layer_has_experts = layers_with_experts(in, config.num_hidden_layers);
  if (std::ranges::none_of(experts.layer_has_experts, [](bool has) { return has; })) experts.num_experts = 0;
}

// Writes the expert settings. llama.cpp's Qwen3-MoE has experts in every layer and always normalises the router weights
// of a token's experts to sum to 1. Error kConfig if the model does not do the same.
void set_expert_keys(const ModelConfig& config, const std::string& where, GgufWriter& writer) {
  const auto& experts = config.experts;
  const bool everywhere =
      experts.num_experts > 0 && std::ranges::find(experts.layer_has_experts, false) == experts.layer_has_experts.end();
  TESSERA_CHECK(everywhere, ErrorKind::kConfig,
                "[gguf] {}: found layers without experts (mlp_only_layers, decoder_sparse_step), which a GGUF of a "
                "Qwen3MoeForCausalLM cannot have",
                where);
  TESSERA_CHECK(experts.norm_topk_prob, ErrorKind::kConfig,
                "[gguf] {}: norm_topk_prob is false, and llama.cpp's Qwen3-MoE always normalises", where);
  writer.set("qwen3moe.expert_count", static_cast<uint32_t>(experts.num_experts));
  writer.set("qwen3moe.expert_used_count", static_cast<uint32_t>(experts.num_experts_per_tok));
  writer.set("qwen3moe.expert_feed_forward_length", static_cast<uint32_t>(experts.intermediate_size));
}

void read_expert_keys_of_gguf(const GgufFile& file, nlohmann::ordered_json& config) {
  const auto used = file.require_uint("qwen3moe.expert_used_count");
  TESSERA_CHECK(used > 0, ErrorKind::kFormat, "[gguf] {}: qwen3moe.expert_used_count is 0", file.path().string());
  config["num_experts"] = file.require_uint("qwen3moe.expert_count");
  config["num_experts_per_tok"] = used;
  // When the file has no expert_feed_forward_length, the default is llama.cpp's: feed_forward_length /
  // expert_used_count.
  config["moe_intermediate_size"] = file.find_uint("qwen3moe.expert_feed_forward_length")
                                        .value_or(config.at("intermediate_size").get<uint64_t>() / used);
  config["norm_topk_prob"] = true;
  config["decoder_sparse_step"] = 1;
  config["mlp_only_layers"] = nlohmann::ordered_json::array();
}

}  // namespace

const ModelFamily& qwen3_moe_family() {
  static const ModelFamily family{
      .architecture = "Qwen3MoeForCausalLM",
      .model_type = "qwen3_moe",
      .config = {.vocab_size = 151936,
                 .hidden_size = 2048,
                 .intermediate_size = 6144,
                 .num_hidden_layers = 24,
                 .max_key_value_heads = 4,
                 .max_position_embeddings = 32768,
                 .biases = BiasKeys::kAttention,
                 .windows = {.has_window_key = true, .has_use_window_key = true},
                 .read_extra = read_expert_keys},
      .make = make_qwen3_moe,
      // In transformers' plan, tensor parallelism also shards the weights of each expert. In this plan, experts are
      // replicated over tensor-parallel ranks, or they are expert-parallel.
      .plan = {.name = "qwen_moe", .top = {{"lm_head", "colwise_gather_output"}}, .layers = normed_layer_styles()},
      .weights = {.stacks = {{".experts.gate_up_proj", {"gate_proj.weight", "up_proj.weight"}},
                             {".experts.down_proj", {"down_proj.weight"}}}},
      .gguf = {.architecture = "qwen3moe",
               .qk_norm = true,
               .experts = true,
               .set_keys = set_expert_keys,
               .read_keys = read_expert_keys_of_gguf}};
  return family;
}

}  // namespace tessera
