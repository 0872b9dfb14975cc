#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/base/log.h"
#include "tessera/base/quote.h"
#include "tessera/formats/gguf_writer.h"
#include "tessera/formats/safetensors_folder.h"
#include "tessera/models/detail/gguf_llama.h"
#include "tessera/models/detail/gguf_tokenizer.h"
#include "tessera/models/family.h"
#include "tessera/models/gguf_convert.h"

namespace tessera {
namespace {

using detail::LlamaShape;

constexpr int64_t kMaxTensorSize = int64_t{1} << 32;
constexpr double kMaxNumber = 1e30;

// The keys of config.json that GGUF has, too.
class Config {
 public:
  explicit Config(const std::filesystem::path& path)
      : where_(path.string()), json_(detail::read_json_object(path)), top_(json_, "[gguf] " + where_), rope_(top_) {
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      const auto found = top_.find(key);
      if (!found || !found->is_object()) continue;
      rope_ = *found;
      has_rope_ = true;
    }
  }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;
  const std::string& where() const { return where_; }

  int64_t whole(const char* key, std::optional<int64_t> absent = std::nullopt) const {
    return top_.integer(key, absent, 0, kMaxTensorSize);
  }
  double number(const char* key, double absent) const { return top_.number(key, absent, kLeast, kMaxNumber); }
  bool flag(const char* key) const { return top_.boolean(key, false); }
  std::string text(const char* key, const std::string& absent) const { return top_.string(key, absent); }

  // The rotary settings, in the old spelling (rope_theta and rope_scaling) or the new (rope_parameters).
  double rope_theta() const { return rope_number("rope_theta", number("rope_theta", 10000)); }
  std::string rope_type() const {
    return has_rope_ ? rope_.string("rope_type", rope_.string("type", "default")) : "default";
  }
  double rope_number(const char* key, double absent) const {
    return has_rope_ ? rope_.number(key, absent, kLeast, kMaxNumber) : absent;
  }
  bool has_rope(const char* key) const { return has_rope_ && rope_.has(key); }

 private:
  static constexpr double kLeast = 1e-30;
  std::string where_;
  Json json_;
  JsonReader top_;
  JsonReader rope_;
  bool has_rope_ = false;
};

const ModelFamily& read_family(const Config& config) {
  const auto type = config.text("model_type", "");
  const auto* family = find_family_of_type(type);
  if (family && family->gguf_tensors) return *family;
  std::vector<std::string_view> known;
  for (const auto* each : model_families()) {
    if (each->gguf_tensors) known.push_back(each->model_type);
  }
  raise(ErrorKind::kConfig, "[gguf] {}: the model_type {} cannot be written as GGUF in this version ({} can)",
        config.where(), quote(type), fmt::join(known, " and "));
}

LlamaShape read_shape(const Config& config) {
  TESSERA_CHECK(config.text("hidden_act", "silu") == "silu", ErrorKind::kConfig,
                "[gguf] {}: hidden_act is {}, wanted silu", config.where(), quote(config.text("hidden_act", "")));
  LlamaShape shape;
  shape.layers = config.whole("num_hidden_layers");
  shape.hidden = config.whole("hidden_size");
  shape.ff = config.whole("intermediate_size");
  shape.heads = config.whole("num_attention_heads");
  TESSERA_CHECK(shape.heads > 0, ErrorKind::kFormat, "[gguf] {}: num_attention_heads is 0", config.where());
  shape.kv_heads = config.whole("num_key_value_heads", shape.heads);
  shape.head_dim = config.whole("head_dim", shape.hidden / shape.heads);
  shape.vocab = config.whole("vocab_size");
  shape.tied = config.flag("tie_word_embeddings");
  shape.attention_bias = config.flag("attention_bias");
  shape.mlp_bias = config.flag("mlp_bias");
  detail::check_llama_shape(shape, config.where());
  return shape;
}

void set_rope_keys(const Config& config, GgufWriter& writer) {
  const auto type = config.rope_type();
  if (type == "linear" || type == "yarn") {
    const double factor = config.rope_number("factor", 1);
    writer.set("llama.rope.scaling.type", type);
    writer.set("llama.rope.scaling.factor", static_cast<float>(factor));
    if (type == "linear") return;
    const double context = config.rope_number("original_max_position_embeddings",
                                              static_cast<double>(config.whole("max_position_embeddings", 2048)));
    writer.set("llama.rope.scaling.original_context_length", static_cast<uint32_t>(context));
    if (config.has_rope("attention_factor")) {
      const double own = 1 + 0.1 * std::log(factor);  // llama.cpp multiplies by this itself
      writer.set("llama.rope.scaling.attn_factor",
                 static_cast<float>(config.rope_number("attention_factor", own) / own));
    }
    for (const auto& [name, key] : {std::pair("beta_fast", "yarn_beta_fast"), {"beta_slow", "yarn_beta_slow"}}) {
      if (config.has_rope(name)) {
        writer.set(fmt::format("llama.rope.scaling.{}", key), static_cast<float>(config.rope_number(name, 1)));
      }
    }
  } else if (type == "dynamic") {
    log_warning("[gguf] {}: dynamic rope scaling does not exist in GGUF; the file is right up to the trained context",
                config.where());
  } else {
    TESSERA_CHECK(type == "default" || type == "llama3", ErrorKind::kConfig,
                  "[gguf] {}: the rope scaling {} cannot be written as GGUF in this version", config.where(),
                  quote(type));
  }
}

std::vector<float> rope_divisors(const Config& config, const LlamaShape& shape) {
  if (config.rope_type() != "llama3") return {};
  const detail::Llama3Scaling scaling{.factor = config.rope_number("factor", 8),
                                      .low_freq_factor = config.rope_number("low_freq_factor", 1),
                                      .high_freq_factor = config.rope_number("high_freq_factor", 4),
                                      .original_context = config.rope_number("original_max_position_embeddings", 8192)};
  return detail::llama3_divisors(scaling, config.rope_theta(), shape.head_dim);
}

uint32_t file_type(GgmlType type) {
  switch (type) {
    case GgmlType::kF32:
      return 0;
    case GgmlType::kF16:
      return 1;
    case GgmlType::kQ8_0:
      return 7;
    case GgmlType::kBF16:
      return 32;
    default:
      raise(ErrorKind::kConfig, "[gguf] tensors can be written as f32, f16, bf16 or q8_0 only");
  }
}

void set_model_keys(const Config& config, const ModelFamily& family, const LlamaShape& shape, const std::string& name,
                    GgmlType type, GgufWriter& writer) {
  const auto number = [&](const char* key, int64_t value) { writer.set(key, static_cast<uint32_t>(value)); };
  writer.set("general.architecture", std::string(family.gguf_architecture));
  writer.set("general.type", std::string("model"));
  writer.set("general.name", name);
  writer.set("general.file_type", file_type(type));
  writer.set("general.quantization_version", uint32_t{2});
  number("llama.vocab_size", shape.vocab);
  number("llama.context_length", config.whole("max_position_embeddings", 2048));
  number("llama.embedding_length", shape.hidden);
  number("llama.block_count", shape.layers);
  number("llama.feed_forward_length", shape.ff);
  number("llama.attention.head_count", shape.heads);
  number("llama.attention.head_count_kv", shape.kv_heads);
  number("llama.attention.key_length", shape.head_dim);
  number("llama.attention.value_length", shape.head_dim);
  number("llama.rope.dimension_count", shape.head_dim);
  writer.set("llama.attention.layer_norm_rms_epsilon", static_cast<float>(config.number("rms_norm_eps", 1e-6)));
  writer.set("llama.rope.freq_base", static_cast<float>(config.rope_theta()));
  set_rope_keys(config, writer);
}

void check_tensors(const SafetensorsFolder& folder, const std::vector<detail::LlamaTensor>& wanted,
                   const LlamaShape& shape, const std::string& dir) {
  std::set<std::string_view> known;
  if (shape.tied) known.insert("lm_head.weight");  // some writers store the tied copy too
  for (const auto& tensor : wanted) {
    const auto& entry = folder.entry(tensor.hf_name);
    TESSERA_CHECK(entry.shape == tensor.shape && at::isFloatingType(entry.dtype), ErrorKind::kFormat,
                  "[gguf] {}: {} is {} [{}], config.json wants [{}]", dir, tensor.hf_name, c10::toString(entry.dtype),
                  fmt::join(entry.shape, ", "), fmt::join(tensor.shape, ", "));
    known.insert(tensor.hf_name);
  }
  for (const auto& [name, file] : folder.files()) {
    const bool derived = name.ends_with("rotary_emb.inv_freq");
    TESSERA_CHECK(derived || known.contains(name), ErrorKind::kConfig,
                  "[gguf] {}: tensor {} has no place in a Llama model of this version", dir, quote(name));
  }
}

GgmlType stored_type(const detail::LlamaTensor& tensor, GgmlType type) {
  if (tensor.shape.size() == 1) return GgmlType::kF32;
  // llama.cpp's own converter does the same with rows that no block divides.
  return type == GgmlType::kQ8_0 && tensor.shape.back() % 32 != 0 ? GgmlType::kF16 : type;
}

}  // namespace

void folder_to_gguf(const std::filesystem::path& dir, const std::filesystem::path& gguf,
                    const GgufExportOptions& options) {
  TESSERA_CHECK(!std::filesystem::exists(gguf), ErrorKind::kIo,
                "[gguf] {}: exists already. Name a file that does not exist.", gguf.string());
  const Config config(dir / "config.json");
  const auto& family = read_family(config);
  const auto shape = read_shape(config);
  const auto folder = SafetensorsFolder::open(dir);
  const auto tensors = family.gguf_tensors(shape);
  check_tensors(folder, tensors, shape, dir.string());
  const bool bfloat16 = folder.entry("model.embed_tokens.weight").dtype == at::kBFloat16;
  const auto type = options.type.value_or(bfloat16 ? GgmlType::kBF16 : GgmlType::kF16);

  GgufWriter writer(gguf);
  const auto folder_name = std::filesystem::absolute(dir / "x").lexically_normal().parent_path().filename().string();
  set_model_keys(config, family, shape, config.text("_name_or_path", folder_name), type, writer);
  detail::set_tokenizer_keys(dir, shape.vocab, writer);
  const auto divisors = rope_divisors(config, shape);
  if (!divisors.empty()) writer.announce("rope_freqs.weight", GgmlType::kF32, {static_cast<int64_t>(divisors.size())});
  for (const auto& tensor : tensors) writer.announce(tensor.gguf_name, stored_type(tensor, type), tensor.shape);
  if (!divisors.empty()) writer.write("rope_freqs.weight", at::tensor(divisors));
  for (const auto& tensor : tensors) {
    auto value = folder.tensor(tensor.hf_name);
    if (tensor.rotary_heads > 0) value = detail::interleave_rotary_rows(value, tensor.rotary_heads);
    writer.write(tensor.gguf_name, value);
  }
  writer.finish();
  log_info("[gguf] {}: {} tensors written to {}", dir.string(), tensors.size(), gguf.string());
}

}  // namespace tessera
