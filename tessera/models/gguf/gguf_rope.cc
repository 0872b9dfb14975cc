#include "tessera/models/gguf/gguf_rope.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/models/config/config.h"

namespace tessera {
namespace {

// The factor by which llama.cpp multiplies cos and sin for yarn; GGUF has no key for it. llama.cpp also multiplies them
// by the value of the key attn_factor.
double implicit_attention_factor(double factor) { return 1 + 0.1 * std::log(factor); }

void set_yarn_keys(const RopeConfig& rope, const std::string& scaling, const std::string& where, GgufWriter& writer) {
  TESSERA_CHECK(rope.truncate, ErrorKind::kConfig, "[gguf] {}: yarn with truncate = false cannot be expressed in GGUF",
                where);
  writer.set(scaling + "original_context_length", static_cast<uint32_t>(rope.original_max_position_embeddings));
  writer.set(scaling + "yarn_beta_fast", static_cast<float>(rope.beta_fast));
  writer.set(scaling + "yarn_beta_slow", static_cast<float>(rope.beta_slow));
  TESSERA_CHECK(rope.mscale == 0 || rope.mscale_all_dim == 0 || rope.attention_factor, ErrorKind::kConfig,
                "[gguf] {}: yarn with mscale cannot be written as GGUF in this version. Set attention_factor instead.",
                where);
  if (rope.attention_factor) {
    writer.set(scaling + "attn_factor",
               static_cast<float>(*rope.attention_factor / implicit_attention_factor(rope.factor)));
  }
}

// Returns the llama3 settings for config.json. The file stores only the divisors of the frequencies, so
// recover_llama3_scaling() searches for settings that give these divisors.
nlohmann::ordered_json llama3_scaling(const GgufFile& file, double theta, int64_t head_dim) {
  const auto divisors = file.tensor("rope_freqs.weight").to(at::kFloat).contiguous();
  const float* first = divisors.const_data_ptr<float>();
  const bool one_each = divisors.numel() == head_dim / 2;
  const auto scaling = one_each ? recover_llama3_scaling({first, first + divisors.numel()}, theta) : std::nullopt;
  TESSERA_CHECK(scaling, ErrorKind::kConfig,
                "[gguf] {}: rope_freqs.weight is not a llama3 scaling with the settings that this version tries "
                "(factors 1 and 4, contexts of powers of two)",
                file.path().string());
  return {{"rope_type", "llama3"},
          {"factor", scaling->factor},
          {"low_freq_factor", scaling->low_freq_factor},
          {"high_freq_factor", scaling->high_freq_factor},
          {"original_max_position_embeddings", scaling->original_max_position_embeddings}};
}

}  // namespace

void set_rope_keys(const RopeConfig& rope, const std::string& architecture, const std::string& where,
                   GgufWriter& writer) {
  const auto scaling = architecture + ".rope.scaling.";
  writer.set(architecture + ".rope.freq_base", static_cast<float>(rope.theta));
  // Llama3 scaling is written as the tensor rope_freqs.weight, not as keys.
  switch (rope.kind) {
    case RopeKind::kDefault:
    case RopeKind::kLlama3:
      return;
    case RopeKind::kDynamic:
      log_warning(
          "[gguf] {}: dynamic rope scaling does not exist in GGUF; the file gives correct results up to the trained "
          "context",
          where);
      return;
    case RopeKind::kLinear:
    case RopeKind::kYarn:
      writer.set(scaling + "type", std::string(rope.kind == RopeKind::kLinear ? "linear" : "yarn"));
      writer.set(scaling + "factor", static_cast<float>(rope.factor));
      if (rope.kind == RopeKind::kYarn) set_yarn_keys(rope, scaling, where, writer);
      return;
  }
}

// A file with the tensor rope_freqs.weight has llama3 scaling. All other rope types are read from the metadata keys.
nlohmann::ordered_json rope_scaling(const GgufFile& file, const std::string& architecture, double theta,
                                    int64_t head_dim) {
  if (file.contains("rope_freqs.weight")) return llama3_scaling(file, theta, head_dim);
  const auto key = [&](const char* name) { return architecture + ".rope.scaling." + name; };
  const auto type = file.find_string(key("type")).value_or("none");
  if (type == "none") return nullptr;
  const double factor = shortest_decimal(file.find_float(key("factor")).value_or(1.0));
  if (type == "linear") return {{"rope_type", "linear"}, {"factor", factor}};
  TESSERA_CHECK(type == "yarn", ErrorKind::kConfig, "[gguf] {}: the rope scaling {} is not supported by this version",
                file.path().string(), quote(type));
  nlohmann::ordered_json scaling = {{"rope_type", "yarn"}, {"factor", factor}};
  if (const auto context = file.find_uint(key("original_context_length"))) {
    scaling["original_max_position_embeddings"] = *context;
  }
  // attention_factor of config.json is the product of both factors that llama.cpp applies: attn_factor and
  // implicit_attention_factor().
  if (const auto attention = file.find_float(key("attn_factor"))) {
    scaling["attention_factor"] = shortest_decimal(*attention) * implicit_attention_factor(factor);
  }
  if (const auto fast = file.find_float(key("yarn_beta_fast"))) scaling["beta_fast"] = shortest_decimal(*fast);
  if (const auto slow = file.find_float(key("yarn_beta_slow"))) scaling["beta_slow"] = shortest_decimal(*slow);
  return scaling;
}

// Returns the numbers by which llama3 scaling divides the frequencies; llama3() in config/rope.cc computes the scaled
// frequencies themselves.
std::vector<float> llama3_divisors(const RopeConfig& rope, int64_t head_dim) {
  std::vector<float> divisors;
  if (rope.kind != RopeKind::kLlama3) return divisors;
  const auto context = static_cast<double>(rope.original_max_position_embeddings);
  for (int64_t i = 0; i < head_dim; i += 2) {
    const double frequency = std::pow(rope.theta, -static_cast<double>(i) / static_cast<double>(head_dim));
    const double turns = context * frequency / (2 * std::numbers::pi);  // rotations within the original context
    double divisor = 1;
    if (turns < rope.low_freq_factor) {
      divisor = rope.factor;
    } else if (turns <= rope.high_freq_factor) {
      const double smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      divisor = 1 / ((1 - smooth) / rope.factor + smooth);
    }
    divisors.push_back(static_cast<float>(divisor));
  }
  return divisors;
}

// Finds the llama3 settings that give `divisors`. `factor` is the largest divisor. low_freq_factor and high_freq_factor
// are assumed to be 1 and 4, as in every released model. original_max_position_embeddings is found by trying values.
// Returns nullopt when no tried value gives the divisors.
std::optional<RopeConfig> recover_llama3_scaling(const std::vector<float>& divisors, double theta) {
  if (divisors.empty()) return std::nullopt;
  RopeConfig scaling;
  scaling.kind = RopeKind::kLlama3;
  scaling.theta = theta;
  scaling.factor = *std::ranges::max_element(divisors);
  const auto head_dim = static_cast<int64_t>(divisors.size()) * 2;
  // For a small head_dim several context lengths can give the same divisors of the frequencies. Therefore 8192 is tried
  // first: it is the original context length of every released model with llama3 scaling.
  for (const int64_t context : {8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16384, 32768, 65536, 131072}) {
    scaling.original_max_position_embeddings = context;
    const auto tried = llama3_divisors(scaling, head_dim);
    const bool fits = std::equal(tried.begin(), tried.end(), divisors.begin(),
                                 [](float a, float b) { return std::fabs(a - b) <= 1e-4F * std::fabs(a); });
    if (fits) return scaling;
  }
  return std::nullopt;
}

// Formats the value as a float32 with the fewest digits and parses these digits as a double. If float32 cannot
// represent the value exactly, returns the value unchanged.
double shortest_decimal(double value) {
  const auto narrow = static_cast<float>(value);
  if (static_cast<double>(narrow) != value) return value;
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, narrow).ptr;
  std::from_chars(text, end, value);
  return value;
}

}  // namespace tessera
