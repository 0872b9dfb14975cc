#include "tessera/models/families/gemma3.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"
#include "tessera/base/warn_once.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/models/config/rope_config.h"
#include "tessera/models/families/families.h"
#include "tessera/models/gguf/gguf_rope.h"

namespace tessera {
namespace {

nn::NormOptions gemma3_norm(const ModelConfig& config) { return {.eps = config.rms_norm_eps, .one_plus = true}; }

nn::AttentionOptions gemma3_attention(const ModelConfig& config, int64_t layer) {
  auto attention = attention_options(config, layer);
  attention.qk_norm = gemma3_norm(config);
  return attention;
}

DecoderParts gemma3_parts(const ModelConfig& config, const nn::ParameterOptions& options) {
  return {.layer = [&](int64_t layer) { return std::make_shared<Gemma3DecoderLayer>(config, layer, options); },
          .norm = gemma3_norm(config),
          .embedding_scale = std::sqrt(static_cast<double>(config.hidden_size))};
}

}  // namespace

Gemma3DecoderLayer::Gemma3DecoderLayer(const ModelConfig& config, int64_t layer, const nn::ParameterOptions& options)
    : DecoderLayer(gemma3_attention(config, layer), config, options, gemma3_norm(config)) {
  register_module("pre_feedforward_layernorm", pre_feedforward_layernorm,
                  std::make_shared<nn::RMSNorm>(config.hidden_size, gemma3_norm(config), options));
  register_module("post_feedforward_layernorm", post_feedforward_layernorm,
                  std::make_shared<nn::RMSNorm>(config.hidden_size, gemma3_norm(config), options));
}

at::Tensor Gemma3DecoderLayer::forward(const at::Tensor& x, const LayerContext& context) {
  const auto attended = x + (*post_attention_layernorm)((*self_attn)((*input_layernorm)(x), context));
  return attended + (*post_feedforward_layernorm)((*mlp)((*pre_feedforward_layernorm)(attended)));
}

Gemma3Model::Gemma3Model(const ModelConfig& config, const nn::ParameterOptions& options) {
  register_module("language_model", language_model,
                  std::make_shared<DecoderModel>(config, gemma3_parts(config, options), options));
}

Gemma3ForConditionalGeneration::Gemma3ForConditionalGeneration(const ModelConfig& config,
                                                               const nn::ParameterOptions& options)
    : CausalLM(config) {
  register_module("model", model, std::make_shared<Gemma3Model>(config, options));
  register_module("lm_head", lm_head, make_head(config, *model->language_model->embed_tokens, options));
}

at::Tensor Gemma3ForConditionalGeneration::forward(const ModelInputs& inputs) {
  const auto& tokens = inputs.tokens;
  if (tokens.defined() && !tokens.is_meta() && !inputs.image_tokens_checked) check_no_image_tokens(config(), tokens);
  return run_decoder(*model->language_model, lm_head.get(), inputs);
}

std::vector<std::shared_ptr<nn::Module>> Gemma3ForConditionalGeneration::blocks() {
  return model->language_model->layers->present();
}

namespace {

// A layer has a sliding window unless its number, counted from 1, is a multiple of sliding_window_pattern (6 by
// default).
bool gemma3_layer_slides(const JsonReader& config, int64_t layer) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const int64_t pattern = config.integer("sliding_window_pattern", 6, 1, kMost);
  // transformers writes _sliding_window_pattern together with layer_types and never reads it. In a file without
  // layer_types, a value that differs from sliding_window_pattern is an error, because transformers would ignore it.
  const int64_t written = config.integer("_sliding_window_pattern", pattern, 1, kMost);
  TESSERA_CHECK(written == pattern, ErrorKind::kConfig,
                "{}: _sliding_window_pattern is {} without layer_types, but transformers uses {}. Set layer_types or "
                "sliding_window_pattern.",
                config.name(), written, pattern);
  return (layer + 1) % pattern != 0;
}

// Merges rope_scaling and rope_parameters.full_attention as transformers does: keys of rope_scaling have priority.
// transformers then reads rope_type and ignores the older key `type` of rope_scaling, so a `type` that differs from
// rope_type is an error. `merged` stores the object that the returned reader reads.
std::optional<JsonReader> full_rope(const JsonReader& text, const std::optional<JsonReader>& full, Json& merged) {
  const auto scaling = text.find("rope_scaling");
  if (!scaling) return full;
  if (!scaling->is_object()) scaling->fail("an object");
  if (scaling->value().empty()) return full;
  merged = full ? full->value() : Json::object({{"rope_type", "default"}});
  if (!merged.is_object()) full->fail("an object");
  merged.update(scaling->value());
  const bool renamed = scaling->has("type") && !scaling->has("rope_type") && merged.contains("rope_type");
  TESSERA_CHECK(!renamed || merged["rope_type"] == scaling->value().at("type"), ErrorKind::kConfig,
                "{}: type: transformers reads only rope_type here. Rename the key to rope_type.", scaling->name());
  return JsonReader(merged, scaling->name(), ErrorKind::kConfig);
}

// For yarn, transformers reads `truncate` next to the objects full_attention and sliding_attention, never inside them.
void check_truncate(const JsonReader& text, const ModelConfig& config) {
  const auto both = text.find("rope_parameters");
  TESSERA_CHECK(
      config.rope.truncate && config.local_rope->truncate && !(both && both->value().contains("truncate")),
      ErrorKind::kConfig,
      "{}: truncate of rope_parameters: transformers writes this key of Gemma3 at a place where it does not read it. "
      "Remove the key.",
      text.name());
}

// Reads the rotary settings: the objects full_attention and sliding_attention of rope_parameters, or the older keys
// rope_theta, rope_scaling and rope_local_base_freq.
void read_gemma3_rope(const JsonReader& text, ModelConfig& config) {
  constexpr double kMost = 1e18;
  std::optional<JsonReader> full, local;
  if (const auto both = text.find("rope_parameters")) {
    if (!both->is_object()) both->fail("an object");
    full = both->find("full_attention");
    local = both->find("sliding_attention");
  }
  Json merged;
  const int64_t context = config.max_position_embeddings;
  config.rope = read_rope(text, full_rope(text, full, merged),
                          {.theta = text.number("rope_theta", 1e6, 1, kMost), .max_positions = context});
  config.local_rope =
      read_rope(text, local, {.theta = text.number("rope_local_base_freq", 1e4, 1, kMost), .max_positions = context});
  check_truncate(text, config);
}

void read_gemma3_text(const JsonReader& text, const JsonReader& /*top*/, ModelConfig& config) {
  TESSERA_CHECK(!text.boolean("use_bidirectional_attention", false), ErrorKind::kConfig,
                "{}: use_bidirectional_attention: this version supports causal models only. Use a causal model.",
                text.name());
  config.query_pre_attn_scalar = text.number("query_pre_attn_scalar", 256.0, 1e-6, 1e9);
  constexpr double kLeastCap = 1e-9;
  for (const auto& [key, cap] : {std::pair("attn_logit_softcapping", &config.attn_logit_softcapping),
                                 {"final_logit_softcapping", &config.final_logit_softcapping}}) {
    if (text.has(key)) *cap = text.number(key, std::nullopt, kLeastCap, 1e9);
  }
  if (config.attn_logit_softcapping > 0) {
    log_warning("{}: attn_logit_softcapping is applied, which transformers leaves out in Gemma3", text.name());
  }
  read_gemma3_rope(text, config);
}

void read_gemma3_with_images(const JsonReader& text, const JsonReader& top, ModelConfig& config) {
  read_gemma3_text(text, top, config);
  if (config.final_logit_softcapping > 0) {
    config.final_logit_softcapping = 0;
    log_warning_once("{}: final_logit_softcapping is left out, as transformers does in Gemma3ForConditionalGeneration",
                     text.name());
  }
  constexpr int64_t kMostTokens = int64_t{1} << 31;
  // image_token_index and boi_token_index each have a second name (`alias`). When a file has both names, transformers
  // uses the second one.
  for (const auto& [key, alias, missing] :
       {std::tuple("image_token_index", "image_token_id", 262'144), {"boi_token_index", "boi_token_id", 255'999}}) {
    config.image_token_ids.push_back(top.integer(top.has(alias) ? alias : key, missing, 0, kMostTokens));
  }
}

// ---- GGUF: windows, the local rotary base, soft caps ----

// Every kUsualPeriod-th layer has full attention. This is llama.cpp's default when the file has no
// sliding_window_pattern.
constexpr int64_t kUsualPeriod = 6;
constexpr int64_t kLayersOf27B = 62;

// Returns the query_pre_attn_scalar that llama.cpp uses; GGUF has no key for it. llama.cpp recognises the 27B model by
// its 62 layers and uses hidden / heads for it. For every other model it uses head_dim.
double default_query_pre_attn_scalar(int64_t layers, int64_t hidden, int64_t heads, int64_t head_dim) {
  return layers == kLayersOf27B ? static_cast<double>(hidden) / static_cast<double>(heads)
                                : static_cast<double>(head_dim);
}

// Returns p if exactly every p-th layer has full attention, or 0 if there is no such p. kUsualPeriod is tried first,
// because several periods fit a model with few layers.
int64_t full_attention_period(const std::vector<bool>& sliding) {
  const auto layers = static_cast<int64_t>(sliding.size());
  const auto fits = [&](int64_t period) {
    for (int64_t i = 0; i < layers; ++i) {
      if (sliding[static_cast<size_t>(i)] != ((i + 1) % period != 0)) return false;
    }
    return true;
  };
  if (fits(kUsualPeriod)) return kUsualPeriod;
  for (int64_t period = 1; period <= layers + 1; ++period) {
    if (fits(period)) return period;
  }
  return 0;
}

// Writes the metadata that only Gemma3 has. Error kConfig for settings that llama.cpp's Gemma3 does not have.
void set_gemma3_keys(const ModelConfig& config, const std::string& where, GgufWriter& writer) {
  const int64_t period = full_attention_period(config.sliding_layers);
  TESSERA_CHECK(period > 0, ErrorKind::kConfig,
                "[gguf] {}: layer_types has no fixed period, and GGUF can express only a period", where);
  TESSERA_CHECK(config.local_rope && config.local_rope->kind == RopeKind::kDefault, ErrorKind::kConfig,
                "[gguf] {}: a rope scaling of the sliding layers cannot be written as GGUF", where);
  TESSERA_CHECK(config.attn_logit_softcapping == 0, ErrorKind::kConfig,
                "[gguf] {}: attn_logit_softcapping {} cannot be written: llama.cpp's Gemma3 has none", where,
                config.attn_logit_softcapping);
  const double scalar = default_query_pre_attn_scalar(config.num_hidden_layers, config.hidden_size,
                                                      config.num_attention_heads, config.head_dim);
  TESSERA_CHECK(std::fabs(config.query_pre_attn_scalar - scalar) < 1e-6 * scalar, ErrorKind::kConfig,
                "[gguf] {}: query_pre_attn_scalar is {}, llama.cpp's Gemma3 of this size has {}", where,
                config.query_pre_attn_scalar, scalar);
  if (config.sliding_window > 0) {
    writer.set("gemma3.attention.sliding_window", static_cast<uint32_t>(config.sliding_window));
  }
  if (period != kUsualPeriod) writer.set("gemma3.attention.sliding_window_pattern", static_cast<uint32_t>(period));
  writer.set("gemma3.rope.freq_base_swa", static_cast<float>(config.local_rope->theta));
  if (config.final_logit_softcapping > 0) {
    writer.set("gemma3.final_logit_softcapping", static_cast<float>(config.final_logit_softcapping));
  }
}

// Adds Gemma3's own keys to the config.json that is made from a GGUF file, which already has the common keys.
void read_gemma3_keys(const GgufFile& file, nlohmann::ordered_json& config) {
  const auto layers = config.at("num_hidden_layers").get<int64_t>();
  const auto window = file.find_uint("gemma3.attention.sliding_window").value_or(0);
  const auto period = file.find_uint("gemma3.attention.sliding_window_pattern").value_or(kUsualPeriod);
  TESSERA_CHECK(
      period > 0 && window < uint64_t{1} << 32, ErrorKind::kFormat,
      "[gguf] {}: found a sliding window of {} with a period of {}, wanted a window below 2^32 and a period above 0",
      file.path().string(), window, period);
  auto types = nlohmann::ordered_json::array();
  for (int64_t i = 0; i < layers; ++i) {
    const bool slides = window > 0 && static_cast<uint64_t>(i + 1) % period != 0;
    types.push_back(slides ? "sliding_attention" : "full_attention");
  }
  config["layer_types"] = types;
  if (window > 0) config["sliding_window"] = window;
  config["rope_local_base_freq"] = shortest_decimal(file.find_float("gemma3.rope.freq_base_swa").value_or(10000.0));
  const auto whole = [&](const char* key) { return config.at(key).get<int64_t>(); };
  config["query_pre_attn_scalar"] = static_cast<int64_t>(
      default_query_pre_attn_scalar(layers, whole("hidden_size"), whole("num_attention_heads"), whole("head_dim")));
  config["attn_logit_softcapping"] = nullptr;
  config["final_logit_softcapping"] = nullptr;
  if (const auto cap = file.find_float("gemma3.final_logit_softcapping")) {
    config["final_logit_softcapping"] = shortest_decimal(*cap);
  }
}

// ---- the ModelFamily rows ----

ConfigKeys gemma3_keys() {
  return {.vocab_size = 262'208,
          .hidden_size = 2304,
          .intermediate_size = 9216,
          .num_hidden_layers = 26,
          .num_attention_heads = 8,
          .max_key_value_heads = 4,
          .head_dim = 256,
          .max_position_embeddings = 131'072,
          .activation = "gelu_pytorch_tanh",
          .activation_key = "hidden_activation",
          .tie_word_embeddings = true,
          .biases = BiasKeys::kAttention,
          .windows = {.has_window_key = true,
                      .has_layer_types_key = true,
                      .is_required = true,
                      .layer_slides = gemma3_layer_slides},
          .bos_token_id = 2,
          .eos_token_id = 1,
          .pad_token_id = 0,
          .read_extra = read_gemma3_text,
          .reads_rope = true};
}

std::shared_ptr<CausalLM> make_gemma3(const ModelConfig& config, const nn::ParameterOptions& options) {
  return std::make_shared<DecoderForCausalLM>(config, gemma3_parts(config, options), options);
}

std::shared_ptr<CausalLM> make_gemma3_with_images(const ModelConfig& config, const nn::ParameterOptions& options) {
  return std::make_shared<Gemma3ForConditionalGeneration>(config, options);
}

}  // namespace

const ModelFamily& gemma3_family() {
  static const ModelFamily family{
      .architecture = "Gemma3ForCausalLM",
      .model_type = "gemma3_text",
      .config = gemma3_keys(),
      .make = make_gemma3,
      .plan = {.name = "gemma3", .top = {{"lm_head", "colwise_gather_output"}}, .layers = normed_layer_styles()},
      .gguf = {.architecture = "gemma3",
               .qk_norm = true,
               .has_post_norms = true,
               .norms_plus_one = true,
               .windows = true,
               .set_keys = set_gemma3_keys,
               .read_keys = read_gemma3_keys}};
  return family;
}

const ModelFamily& gemma3_conditional_family() {
  static const ModelFamily family = [] {
    auto row = gemma3_family();
    row.architecture = "Gemma3ForConditionalGeneration";
    row.model_type = "gemma3";
    row.config.text_config = "text_config";
    row.config.read_extra = read_gemma3_with_images;
    row.make = make_gemma3_with_images;
    row.plan.base_module = "model.language_model";
    row.weights = {
        .prefixes = {{"model.language_model.", "language_model.model."}, {"lm_head.", "language_model.lm_head."}},
        .unowned_prefixes = {"vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                             "model.multi_modal_projector."}};
    row.gguf = {};  // llama.cpp stores the vision tower in a separate file
    return row;
  }();
  return family;
}

}  // namespace tessera
