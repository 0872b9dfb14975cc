#include "tessera/models/config/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/models/config/family.h"
#include "tessera/models/config/rope_config.h"

namespace tessera {
namespace {

constexpr JsonLimits kLimits{.max_bytes = 16 << 20, .max_depth = 32};
constexpr int64_t kMaxSize = int64_t{1} << 31;      // elements of one dim
constexpr int64_t kMaxElements = int64_t{1} << 40;  // elements of one weight
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxContext = int64_t{1} << 40;
// Names of dtypes in config.json. When a dtype has several names, dtype_name() returns the first one.
constexpr std::pair<std::string_view, c10::ScalarType> kDtypeNames[] = {
    {"float32", c10::ScalarType::Float}, {"float", c10::ScalarType::Float}, {"bfloat16", c10::ScalarType::BFloat16},
    {"float16", c10::ScalarType::Half},  {"half", c10::ScalarType::Half},   {"float64", c10::ScalarType::Double},
    {"double", c10::ScalarType::Double}};

// Returns the first entry of `architectures`. An empty list counts as a missing key, as in transformers.
std::optional<std::string> first_architecture(const JsonReader& top) {
  const auto list = top.find("architectures");
  if (!list || (list->is_array() && list->value().empty())) return std::nullopt;
  const auto& names = list->value();
  TESSERA_CHECK(names.is_array() && names.front().is_string(), ErrorKind::kFormat,
                "{}: found {}, wanted a list of names", list->name(), describe(names));
  return names.front().get<std::string>();
}

// transformers selects the model by model_type alone. If `architectures` names another model than model_type does,
// transformers would load another model than this library, so the file is an error.
void check_model_type(const JsonReader& top, const ModelFamily& family) {
  const auto type = top.string("model_type", family.model_type);
  TESSERA_CHECK(type == family.model_type || (!family.other_model_type.empty() && type == family.other_model_type),
                ErrorKind::kConfig,
                "{}: model_type {} does not belong to architecture {}, whose model_type is {}. Correct one of them.",
                top.name(), quote(type, 60), family.architecture, family.model_type);
}

// The family that config.json names, and the key and value in config.json that select the family.
struct NamedFamily {
  const char* key;
  std::string name;
  const ModelFamily* family;  // null: not supported by this version
};

NamedFamily named_family(const JsonReader& top) {
  if (const auto architecture = first_architecture(top)) {
    return {"architectures", *architecture, find_family(*architecture)};
  }
  const auto type = top.string("model_type", "");
  return {"model_type", type, find_family_of_type(type)};
}

const ModelFamily& parse_family(const JsonReader& top) {
  const auto [key, name, family] = named_family(top);
  TESSERA_CHECK(family, ErrorKind::kFormat, "{}: {}: architecture {} is not supported. Supported: {}.", top.name(), key,
                quote(name, 60), fmt::join(supported_architectures(), ", "));
  check_model_type(top, *family);
  return *family;
}

// Older models have rope_theta and rope_scaling, newer models have rope_parameters. When both objects are there,
// rope_scaling is used, unless it is empty.
RopeConfig parse_rope(const JsonReader& in, int64_t max_positions) {
  auto object = in.find("rope_scaling");
  if (!object || (object->is_object() && object->value().empty())) object = in.find("rope_parameters");
  if (object && object->is_object()) {
    for (const char* kind : {"full_attention", "sliding_attention"}) {
      TESSERA_CHECK(!object->value().contains(kind), ErrorKind::kConfig,
                    "{}: {}: rotary settings of one kind of layer are not supported for this architecture. Give one "
                    "setting for all layers.",
                    object->name(), kind);
    }
  }
  return read_rope(in, object,
                   {.theta = in.number("rope_theta", 10000.0, 1.0, 1e18),
                    .max_positions = max_positions,
                    .parent_original_has_priority = true});
}

// Returns the context length that a rotary scaling gives, as vLLM computes it: factor * original context for yarn, and
// factor * max_position_embeddings for linear and dynamic. For llama3 and Gemma3, max_position_embeddings already is
// the scaled length.
int64_t scaled_context_tokens(const ModelConfig& config) {
  const auto& rope = config.rope;
  auto base = static_cast<double>(config.max_position_embeddings);
  if (rope.kind == RopeKind::kDefault || rope.kind == RopeKind::kLlama3) return config.max_position_embeddings;
  if (rope.kind == RopeKind::kYarn) base = static_cast<double>(rope.original_max_position_embeddings);
  return static_cast<int64_t>(std::clamp(base * rope.factor, 1.0, static_cast<double>(kMaxContext)));
}

nn::Activation parse_activation(const JsonReader& in, const ConfigKeys& keys) {
  const auto found = in.string(keys.activation_key, keys.activation);
  if (found == "silu" || found == "swish") return nn::Activation::kSilu;
  TESSERA_CHECK(found == "gelu_pytorch_tanh", ErrorKind::kConfig,
                "{}: {} {} is not supported: wanted silu or gelu_pytorch_tanh", in.name(), keys.activation_key,
                quote(found));
  return nn::Activation::kGeluTanh;
}

// Describes the method of a quantization_config for an error: quant_method, or a key that shows the method, such as
// load_in_4bit.
std::string quantization_method(const JsonReader& settings) {
  if (!settings.is_object()) return describe(settings.value());
  if (settings.has("quant_method")) return quote(settings.string("quant_method"), 60);
  for (const char* key : {"load_in_4bit", "load_in_8bit", "bits", "w_bit"}) {
    if (settings.has(key)) return fmt::format("an unnamed method, {} {}", key, describe(settings.at(key).value()));
  }
  return "an unnamed method";
}

void refuse_quantised(const JsonReader& in) {
  const auto settings = in.find("quantization_config");
  if (!settings) return;
  raise(ErrorKind::kConfig,
        "{}: quantization_config: weights quantised with {} are not supported. Use the unquantised model, or a GGUF "
        "file of it.",
        in.name(), quantization_method(*settings));
}

void warn_and_refuse(const JsonReader& top, const JsonReader& in) {
  if (top.has("auto_map")) log_info("{}: auto_map names Python code, which is ignored", top.name());
  if (in.number("attention_dropout", 0.0, 0, 1) > 0) {
    log_warning("{}: attention_dropout is not applied in training", in.name());
  }
  refuse_quantised(top);
  refuse_quantised(in);
  for (const auto& reader : {top, in}) {
    for (const char* key : {"per_layer_config", "transformers_weights", "configuration_files"}) {
      TESSERA_CHECK(!reader.has(key), ErrorKind::kConfig, "{}: {} is not supported. Remove it, or use another model.",
                    reader.name(), key);
    }
    // transformers reads a null is_causal as false.
    TESSERA_CHECK(!reader.value().contains("is_causal") || reader.boolean("is_causal", false), ErrorKind::kConfig,
                  "{}: is_causal: this version supports causal models only. Use a causal model.", reader.name());
  }
}

// head_dim defaults to hidden_size / heads when neither the file nor the family sets it; the division must then be
// exact.
void parse_heads(const JsonReader& in, const ConfigKeys& keys, ModelConfig& config) {
  const int64_t heads = in.integer("num_attention_heads", keys.num_attention_heads, 1, kMaxSize);
  // A null num_key_value_heads means one key/value head per query head; a missing key means the family's default.
  const bool null = in.value().contains("num_key_value_heads") && !in.has("num_key_value_heads");
  const int64_t default_kv_heads =
      keys.max_key_value_heads && !null ? std::min(keys.max_key_value_heads, heads) : heads;
  config.num_attention_heads = heads;
  config.num_key_value_heads = in.integer("num_key_value_heads", default_kv_heads, 1, kMaxSize);
  const bool has_head_dim = in.has("head_dim") || keys.head_dim > 0;
  TESSERA_CHECK(has_head_dim || config.hidden_size % heads == 0, ErrorKind::kConfig,
                "{}: hidden_size {} is not a multiple of num_attention_heads {}", in.name(), config.hidden_size, heads);
  config.head_dim = in.integer(
      "head_dim", keys.head_dim ? keys.head_dim : std::max<int64_t>(1, config.hidden_size / heads), 1, 1 << 16);
  TESSERA_CHECK(heads % config.num_key_value_heads == 0, ErrorKind::kConfig,
                "{}: num_attention_heads {} is not a multiple of num_key_value_heads {}", in.name(), heads,
                config.num_key_value_heads);
  TESSERA_CHECK(config.head_dim % 2 == 0, ErrorKind::kConfig, "{}: head_dim {} is odd, rotary positions need pairs",
                in.name(), config.head_dim);
}

void parse_biases(const JsonReader& in, BiasKeys keys, ModelConfig& config) {
  if (keys == BiasKeys::kNone) return;
  const bool has_attention_bias = keys != BiasKeys::kQueryKeyValue && in.boolean("attention_bias", false);
  config.qkv_bias = keys == BiasKeys::kQueryKeyValue || has_attention_bias;
  config.output_bias = has_attention_bias;
  config.mlp_bias = keys == BiasKeys::kAttentionAndMlp && in.boolean("mlp_bias", false);
}

// Whether a layer of this type has a sliding window. "attention" is an older name of full_attention.
bool parse_layer_type(const JsonReader& type, const ModelConfig& config) {
  auto kind = type.as_string();
  if (kind == "attention") kind = "full_attention";
  TESSERA_CHECK(kind == "full_attention" || kind == "sliding_attention", ErrorKind::kConfig,
                "{}: found {}, wanted full_attention or sliding_attention", type.name(), quote(kind));
  TESSERA_CHECK(kind == "full_attention" || config.sliding_window > 0, ErrorKind::kConfig,
                "{}: sliding_attention without a sliding_window. Set it, or make all layers full_attention.",
                type.name());
  return kind == "sliding_attention";
}

// Returns the size of the sliding window in tokens, or 0 for no window. If sliding_window is missing, the family's
// default applies; null means no window.
int64_t parse_window(const JsonReader& in, const WindowKeys& keys) {
  const bool off = keys.has_use_window_key && !in.boolean("use_sliding_window", false);
  if (!keys.has_window_key || off) return 0;
  const bool null = in.value().contains("sliding_window") && !in.has("sliding_window");
  return null ? 0 : in.integer("sliding_window", keys.default_window, 1, kMaxContext);
}

// Returns for each layer whether it has a sliding window, for a config.json without layer_types.
std::vector<bool> default_sliding_layers(const JsonReader& in, const WindowKeys& keys, const ModelConfig& config) {
  std::vector<bool> slides;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    slides.push_back(!keys.layer_slides || keys.layer_slides(in, i));
  }
  const bool any = std::ranges::find(slides, true) != slides.end();
  if (config.sliding_window > 0 || !any) return slides;
  TESSERA_CHECK(!keys.is_required, ErrorKind::kConfig,
                "{}: sliding_window is null and layers slide. Set it, or make all layer_types full_attention.",
                in.name());
  return std::vector<bool>(slides.size(), false);
}

void parse_windows(const JsonReader& in, const WindowKeys& keys, ModelConfig& config) {
  config.sliding_layers.assign(static_cast<size_t>(config.num_hidden_layers), false);
  config.sliding_window = parse_window(in, keys);
  const auto types = keys.has_layer_types_key ? in.find("layer_types") : std::nullopt;
  if (types) {
    const auto items = types->items();
    TESSERA_CHECK(static_cast<int64_t>(items.size()) == config.num_hidden_layers, ErrorKind::kConfig,
                  "{}: found {} types, wanted one for each of the {} layers", types->name(), items.size(),
                  config.num_hidden_layers);
    for (size_t i = 0; i < items.size(); ++i) config.sliding_layers[i] = parse_layer_type(items[i], config);
  } else if (keys.has_window_key) {
    config.sliding_layers = default_sliding_layers(in, keys, config);
  }
  if (std::ranges::none_of(config.sliding_layers, [](bool slides) { return slides; })) config.sliding_window = 0;
}

// Reads bos_token_id, eos_token_id and pad_token_id. A key at the top level of the file has priority over the key in
// `in` (text_config). A null value gives no id; a missing key gives the family's default.
void parse_tokens(const JsonReader& top, const JsonReader& in, const ConfigKeys& keys, ModelConfig& config) {
  const int64_t last = config.vocab_size - 1;
  const auto ids = [&](const char* key, int64_t least, std::optional<int64_t> missing) -> std::vector<int64_t> {
    const auto& where = top.value().contains(key) ? top : in;
    if (const auto found = where.integers(key, least, last); !found.empty() || where.value().contains(key)) {
      return found;
    }
    if (missing && *missing <= last) return {*missing};
    return {};
  };
  if (const auto found = ids("bos_token_id", 0, keys.bos_token_id); !found.empty()) config.bos_token_id = found.front();
  config.eos_token_ids = ids("eos_token_id", 0, keys.eos_token_id);
  if (const auto found = ids("pad_token_id", -1, keys.pad_token_id); !found.empty()) {
    config.pad_token_id = found.front();
  }
}

void parse_dtype(const JsonReader& in, ModelConfig& config) {
  for (const char* key : {"torch_dtype", "dtype"}) {
    if (!in.has(key)) continue;
    const auto spelled = in.string(key);
    config.dtype = parse_dtype_name(spelled);
    TESSERA_CHECK(config.dtype, ErrorKind::kConfig, "{}: {} {} is not supported: wanted float32, bfloat16 or float16",
                  in.name(), key, quote(spelled));
  }
}

// Reads the keys that all families share. `in` is the object with the text model's keys.
void parse_text_config(const JsonReader& in, const ConfigKeys& keys, ModelConfig& config) {
  config.vocab_size = in.integer("vocab_size", keys.vocab_size, 1, kMaxSize);
  config.hidden_size = in.integer("hidden_size", keys.hidden_size, 1, kMaxSize);
  config.intermediate_size = in.integer("intermediate_size", keys.intermediate_size, 1, kMaxSize);
  config.num_hidden_layers = in.integer("num_hidden_layers", keys.num_hidden_layers, 1, kMaxLayers);
  parse_heads(in, keys, config);
  for (const int64_t other :
       {config.vocab_size, config.intermediate_size, config.num_attention_heads * config.head_dim}) {
    TESSERA_CHECK(other <= kMaxElements / config.hidden_size, ErrorKind::kConfig,
                  "{}: a weight of {} x {} is too large: at most {} elements", in.name(), other, config.hidden_size,
                  kMaxElements);
  }
  config.max_position_embeddings = in.integer("max_position_embeddings", keys.max_position_embeddings, 1, kMaxContext);
  config.rms_norm_eps = in.number("rms_norm_eps", 1e-6, 0, 1);
  config.initializer_range = in.number("initializer_range", 0.02, 0, 100);
  config.activation = parse_activation(in, keys);
  parse_biases(in, keys.biases, config);
  parse_windows(in, keys.windows, config);
}

}  // namespace

std::optional<c10::ScalarType> parse_dtype_name(std::string_view name) {
  if (name.starts_with("torch.")) name.remove_prefix(6);
  for (const auto& [known, dtype] : kDtypeNames) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

std::string dtype_name(c10::ScalarType dtype) {
  for (const auto& [name, known] : kDtypeNames) {
    if (known == dtype) return std::string(name);
  }
  raise(ErrorKind::kInternal, "[models.config] {} is not a dtype of a model's weights", c10::toString(dtype));
}

ModelConfig ModelConfig::from_folder(const std::filesystem::path& dir) {
  const auto path = dir / "config.json";
  TESSERA_CHECK(
      std::filesystem::exists(path) || !std::filesystem::exists(dir / "adapter_config.json"), ErrorKind::kIo,
      "[models.config] {}: holds only adapters. Merge them into their model with 'tessera ckpt convert MODEL DIR "
      "--to hf --adapter {}', and use DIR.",
      dir.string(), dir.string());
  TESSERA_CHECK(std::filesystem::exists(path), ErrorKind::kIo,
                "[models.config] {}: holds no config.json, wanted a Hugging Face model folder or a GGUF file.",
                dir.string());
  return parse(read_file(path, kLimits.max_bytes), path.string());
}

// The family is found first, because it decides which keys exist and their defaults. A family with images has the text
// model's keys in a nested object (text_config).
ModelConfig ModelConfig::parse(std::string_view text, const std::string& name) {
  static const Json kEmptyObject = Json::object();
  const std::string where = "[models.config] " + name;
  auto source = std::make_shared<Json>(parse_json_object(text, where, kLimits));
  const JsonReader top(*source, where, ErrorKind::kConfig);
  ModelConfig config;
  const auto& family = parse_family(top);
  config.architecture = family.architecture;
  const auto nested = family.config.text_config.empty() ? top : top.find(family.config.text_config);
  const JsonReader in = nested.value_or(JsonReader(kEmptyObject, where, ErrorKind::kConfig));
  if (!in.is_object()) in.fail("an object");
  warn_and_refuse(top, in);
  parse_text_config(in, family.config, config);
  // transformers reads tie_word_embeddings at the top level of the file, not in text_config.
  config.tie_word_embeddings = top.boolean("tie_word_embeddings", family.config.tie_word_embeddings);
  if (!family.config.reads_rope) config.rope = parse_rope(in, config.max_position_embeddings);
  if (family.config.read_extra) family.config.read_extra(in, top, config);
  config.context_tokens = family.config.reads_rope ? config.max_position_embeddings : scaled_context_tokens(config);
  parse_dtype(in, config);
  parse_dtype(top, config);
  parse_tokens(top, in, family.config, config);
  config.source_ = std::move(source);
  return config;
}

std::optional<std::string> unknown_architecture(const std::filesystem::path& dir) {
  const auto path = dir / "config.json";
  const std::string where = "[models.config] " + path.string();
  const auto json = parse_json_object(read_file(path, kLimits.max_bytes), where, kLimits);
  const auto named = named_family(JsonReader(json, where, ErrorKind::kConfig));
  if (named.family) return std::nullopt;
  return named.name;
}

std::string ModelConfig::to_json(c10::ScalarType saved_dtype) const {
  auto saved = *source_;
  // config.json has the dtype under `torch_dtype` or, in newer files, under `dtype`. The key that the file already has
  // is kept, because every reader of config.json knows both keys.
  const auto set_where_there = [&](Json& object) {
    for (const char* key : {"torch_dtype", "dtype"}) {
      if (object.contains(key)) object[key] = dtype_name(saved_dtype);
    }
  };
  // A config.json with neither `torch_dtype` nor `dtype` gets the key `dtype`.
  if (!saved.contains("torch_dtype") && !saved.contains("dtype")) saved["dtype"] = "";
  set_where_there(saved);
  if (saved.contains("text_config") && saved["text_config"].is_object()) set_where_there(saved["text_config"]);
  return saved.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tessera
