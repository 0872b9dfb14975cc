#include "tessera/models/config.h"

#include <fmt/ranges.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/json.h"
#include "tessera/base/log.h"
#include "tessera/base/quote.h"
#include "tessera/models/family.h"

namespace tessera {
namespace {

constexpr JsonLimits kLimits{.max_bytes = 16 << 20, .max_depth = 32};
constexpr int64_t kMaxSize = int64_t{1} << 31;      // of one dimension
constexpr int64_t kMaxElements = int64_t{1} << 40;  // of one weight
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxContext = int64_t{1} << 40;

RopeKind parse_rope_kind(const std::string& kind, const std::string& name) {
  if (kind == "default") return RopeKind::kDefault;
  if (kind == "linear") return RopeKind::kLinear;
  if (kind == "dynamic") return RopeKind::kDynamic;
  if (kind == "yarn") return RopeKind::kYarn;
  if (kind == "llama3") return RopeKind::kLlama3;
  raise(ErrorKind::kConfig, "{}: rope type {} is not supported: wanted default, linear, dynamic, yarn or llama3", name,
        quote(kind));
}

// rope_parameters holds everything; the older rope_scaling leaves theta beside itself and may say "type".
RopeConfig parse_rope(const JsonReader& top, int64_t max_positions) {
  RopeConfig rope;
  const double top_theta = top.number("rope_theta", 10000.0, 1.0, 1e18);
  const auto object = top.find(top.has("rope_scaling") ? "rope_scaling" : "rope_parameters");
  rope.theta = top_theta;
  rope.original_max_position_embeddings = max_positions;
  if (!object) return rope;
  if (!object->is_object()) object->fail("an object");
  const JsonReader& in = *object;
  rope.kind = parse_rope_kind(in.string("rope_type", in.string("type", "default")), in.name());
  rope.theta = in.number("rope_theta", top_theta, 1.0, 1e18);
  TESSERA_CHECK(in.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0, 0, 1e3), 0, 1e3) == 1.0,
                ErrorKind::kConfig, "{}: a partial_rotary_factor other than 1 is not supported", in.name());
  if (rope.kind == RopeKind::kDefault) return rope;
  rope.original_max_position_embeddings =
      top.integer("original_max_position_embeddings",
                  in.integer("original_max_position_embeddings", max_positions, 1, kMaxContext), 1, kMaxContext);
  // yarn may leave the factor to the ratio of the two context lengths.
  const bool derived = rope.kind == RopeKind::kYarn && !in.has("factor");
  rope.factor = derived
                    ? static_cast<double>(max_positions) / static_cast<double>(rope.original_max_position_embeddings)
                    : in.number("factor", std::nullopt, 1e-6, 1e9);
  if (rope.kind == RopeKind::kLlama3) {
    rope.low_freq_factor = in.number("low_freq_factor", std::nullopt, 1e-6, 1e9);
    rope.high_freq_factor = in.number("high_freq_factor", std::nullopt, 1e-6, 1e9);
    TESSERA_CHECK(rope.low_freq_factor < rope.high_freq_factor, ErrorKind::kConfig,
                  "{}: low_freq_factor {} is not below high_freq_factor {}", in.name(), rope.low_freq_factor,
                  rope.high_freq_factor);
  }
  if (rope.kind == RopeKind::kYarn) {
    if (in.has("attention_factor")) rope.attention_factor = in.number("attention_factor", std::nullopt, 0, 1e6);
    rope.beta_fast = in.number("beta_fast", 32.0, 1e-6, 1e9);
    rope.beta_slow = in.number("beta_slow", 1.0, 1e-6, 1e9);
    rope.mscale = in.number("mscale", 0.0, 0, 1e6);
    rope.mscale_all_dim = in.number("mscale_all_dim", 0.0, 0, 1e6);
    rope.truncate = in.boolean("truncate", true);
  }
  return rope;
}

const ModelFamily& parse_family(const JsonReader& top) {
  std::string found;
  const ModelFamily* family = nullptr;
  if (const auto list = top.find("architectures")) {
    const auto& names = list->value();
    TESSERA_CHECK(names.is_array() && !names.empty() && names.front().is_string(), ErrorKind::kFormat,
                  "{}: found {}, wanted a list of names", list->name(), describe(names));
    found = names.front().get<std::string>();
    family = find_family(found);
  } else {
    found = top.string("model_type", "");
    family = find_family_of_type(found);
  }
  TESSERA_CHECK(family, ErrorKind::kFormat, "{}: architecture {} is not supported. Supported: {}.", top.name(),
                quote(found, 60), fmt::join(supported_architectures(), ", "));
  return *family;
}

void check_text(const JsonReader& top) {
  const auto activation = top.string("hidden_act", "silu");
  TESSERA_CHECK(activation == "silu" || activation == "swish", ErrorKind::kConfig,
                "{}: hidden_act {} is not supported: wanted silu", top.name(), quote(activation));
  if (top.has("auto_map")) log_info("{}: auto_map names Python code, which is ignored", top.name());
  if (top.number("attention_dropout", 0.0, 0, 1) > 0) {
    log_warning("{}: attention_dropout is not applied in training", top.name());
  }
  TESSERA_CHECK(!top.has("quantization_config"), ErrorKind::kConfig,
                "{}: quantization_config: quantised weights are not supported. Use the unquantised model.", top.name());
}

}  // namespace

std::optional<c10::ScalarType> parse_dtype_name(std::string_view name) {
  if (name.substr(0, 6) == "torch.") name.remove_prefix(6);
  if (name == "float32" || name == "float") return c10::ScalarType::Float;
  if (name == "bfloat16") return c10::ScalarType::BFloat16;
  if (name == "float16" || name == "half") return c10::ScalarType::Half;
  if (name == "float64" || name == "double") return c10::ScalarType::Double;
  return std::nullopt;
}

std::string dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::Double:
      return "float64";
    default:
      raise(ErrorKind::kInternal, "[models.config] {} is no dtype of a model", c10::toString(dtype));
  }
}

ModelConfig ModelConfig::from_folder(const std::filesystem::path& dir) {
  const auto path = dir / "config.json";
  TESSERA_CHECK(std::filesystem::exists(path), ErrorKind::kIo,
                "[models.config] {}: holds no config.json, wanted a Hugging Face model folder. For a GGUF file run "
                "'tessera ckpt convert FILE DIR' first.",
                dir.string());
  return parse(read_file(path, kLimits.max_bytes), path.string());
}

ModelConfig ModelConfig::parse(std::string_view text, const std::string& name) {
  const std::string where = "[models.config] " + name;
  auto source = std::make_shared<Json>(parse_json_object(text, where, kLimits));
  const JsonReader top(*source, where, ErrorKind::kConfig);
  ModelConfig config;
  const auto& family = parse_family(top);
  config.architecture = family.architecture;
  check_text(top);
  config.vocab_size = top.integer("vocab_size", 32000, 1, kMaxSize);
  config.hidden_size = top.integer("hidden_size", 4096, 1, kMaxSize);
  config.intermediate_size = top.integer("intermediate_size", family.config.intermediate_size, 1, kMaxSize);
  config.num_hidden_layers = top.integer("num_hidden_layers", 32, 1, kMaxLayers);
  config.num_attention_heads = top.integer("num_attention_heads", 32, 1, kMaxSize);
  const int64_t heads = config.num_attention_heads, fewer = family.config.most_key_value_heads;
  config.num_key_value_heads = top.integer("num_key_value_heads", fewer ? std::min(fewer, heads) : heads, 1, kMaxSize);
  TESSERA_CHECK(top.has("head_dim") || config.hidden_size % heads == 0, ErrorKind::kConfig,
                "[models.config] {}: hidden_size {} is no multiple of num_attention_heads {}", name, config.hidden_size,
                heads);
  config.head_dim = top.integer("head_dim", std::max<int64_t>(1, config.hidden_size / heads), 1, 1 << 16);
  TESSERA_CHECK(heads % config.num_key_value_heads == 0, ErrorKind::kConfig,
                "[models.config] {}: num_attention_heads {} is no multiple of num_key_value_heads {}", name, heads,
                config.num_key_value_heads);
  TESSERA_CHECK(config.head_dim % 2 == 0, ErrorKind::kConfig,
                "[models.config] {}: head_dim {} is odd, rotary positions need pairs", name, config.head_dim);
  for (const int64_t other : {config.vocab_size, config.intermediate_size, heads * config.head_dim}) {
    TESSERA_CHECK(other <= kMaxElements / config.hidden_size, ErrorKind::kConfig,
                  "[models.config] {}: a weight of {} x {} is too large: at most {} elements", name, other,
                  config.hidden_size, kMaxElements);
  }
  config.max_position_embeddings =
      top.integer("max_position_embeddings", family.config.max_position_embeddings, 1, kMaxContext);
  config.sliding_window = family.config.sliding_window ? top.integer("sliding_window", 0, 0, kMaxContext) : 0;
  config.rms_norm_eps = top.number("rms_norm_eps", 1e-6, 0, 1);
  config.initializer_range = top.number("initializer_range", 0.02, 0, 100);
  config.attention_bias = family.config.biases && top.boolean("attention_bias", false);
  config.mlp_bias = family.config.biases && top.boolean("mlp_bias", false);
  config.tie_word_embeddings = top.boolean("tie_word_embeddings", false);
  config.rope = parse_rope(top, config.max_position_embeddings);
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (!top.has(key)) continue;
    const auto spelled = top.string(key);
    config.dtype = parse_dtype_name(spelled);
    TESSERA_CHECK(config.dtype, ErrorKind::kConfig,
                  "[models.config] {}: {} {} is not supported: wanted float32, bfloat16 or float16", name, key,
                  quote(spelled));
  }
  // The families of transformers have 1 and 2 where the keys are left out; null means none.
  if (!source->contains("bos_token_id")) config.bos_token_id = 1;
  if (!source->contains("eos_token_id")) config.eos_token_ids = {2};
  const int64_t last = config.vocab_size - 1;
  if (const auto ids = top.integers("bos_token_id", 0, last); !ids.empty()) config.bos_token_id = ids.front();
  if (const auto ids = top.integers("eos_token_id", 0, last); !ids.empty()) config.eos_token_ids = ids;
  if (const auto ids = top.integers("pad_token_id", -1, last); !ids.empty()) config.pad_token_id = ids.front();
  config.source_ = std::move(source);
  return config;
}

std::string ModelConfig::to_json(c10::ScalarType saved_dtype) const {
  auto saved = *source_;
  // Under the name that the file used; both readers know both.
  const char* key = saved.contains("torch_dtype") && !saved.contains("dtype") ? "torch_dtype" : "dtype";
  saved[key] = dtype_name(saved_dtype);
  if (saved.contains("torch_dtype")) saved["torch_dtype"] = dtype_name(saved_dtype);
  return saved.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tessera
