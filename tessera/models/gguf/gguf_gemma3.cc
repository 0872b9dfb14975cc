#include "tessera/models/gguf/gguf_gemma3.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/models/config/config.h"
#include "tessera/models/gguf/gguf_rope.h"

namespace tessera {
namespace {

constexpr int64_t kUsualPeriod = 6;  // every sixth layer sees everything; llama.cpp's own where the file does not say
constexpr int64_t kLayersOf27B = 62;

// llama.cpp knows the scale of the scores by the number of layers.
double score_scalar(int64_t layers, int64_t hidden, int64_t heads, int64_t head_dim) {
  return layers == kLayersOf27B ? static_cast<double>(hidden) / static_cast<double>(heads)
                                : static_cast<double>(head_dim);
}

// The period of the layers that see everything; 0: there is none.
int64_t period_of(const std::vector<bool>& sliding) {
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

}  // namespace

void set_gemma3_keys(const ModelConfig& config, const std::string& where, GgufWriter& writer) {
  const int64_t period = period_of(config.sliding_layers);
  TESSERA_CHECK(period > 0, ErrorKind::kConfig,
                "[gguf] {}: layer_types is no pattern of equal periods, which GGUF cannot hold", where);
  TESSERA_CHECK(config.local_rope && config.local_rope->kind == RopeKind::kDefault, ErrorKind::kConfig,
                "[gguf] {}: a rope scaling of the sliding layers cannot be written as GGUF", where);
  TESSERA_CHECK(config.attn_logit_softcapping == 0, ErrorKind::kConfig,
                "[gguf] {}: attn_logit_softcapping {} cannot be written: llama.cpp's Gemma3 has none", where,
                config.attn_logit_softcapping);
  const double scalar =
      score_scalar(config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim);
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

void read_gemma3_keys(const GgufFile& file, nlohmann::ordered_json& config) {
  const auto layers = config.at("num_hidden_layers").get<int64_t>();
  const auto window = file.find_uint("gemma3.attention.sliding_window").value_or(0);
  const auto period = file.find_uint("gemma3.attention.sliding_window_pattern").value_or(kUsualPeriod);
  TESSERA_CHECK(period > 0 && window < uint64_t{1} << 32, ErrorKind::kFormat,
                "[gguf] {}: a sliding window of {} in a pattern of {}", file.path().string(), window, period);
  auto types = nlohmann::ordered_json::array();
  for (int64_t i = 0; i < layers; ++i) {
    const bool slides = window > 0 && static_cast<uint64_t>(i + 1) % period != 0;
    types.push_back(slides ? "sliding_attention" : "full_attention");
  }
  config["layer_types"] = types;
  if (window > 0) config["sliding_window"] = window;
  config["rope_local_base_freq"] = shortest_decimal(file.find_float("gemma3.rope.freq_base_swa").value_or(10000.0));
  const auto whole = [&](const char* key) { return config.at(key).get<int64_t>(); };
  config["query_pre_attn_scalar"] =
      static_cast<int64_t>(score_scalar(layers, whole("hidden_size"), whole("num_attention_heads"), whole("head_dim")));
  config["attn_logit_softcapping"] = nullptr;
  config["final_logit_softcapping"] = nullptr;
  if (const auto cap = file.find_float("gemma3.final_logit_softcapping")) {
    config["final_logit_softcapping"] = shortest_decimal(*cap);
  }
}

}  // namespace tessera
