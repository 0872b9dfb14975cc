// A family of models: all models with one architecture name. One constant ModelFamily (a "row") describes a family; it
// is in the source file of the family's model.
//
//   const ModelFamily& family = family_of("MistralForCausalLM");     // Error kFormat lists the supported architectures
//   std::shared_ptr<CausalLM> model = family.make(config, options);
//
// To add a family, write its model file with its row and add the row to model_families(). The row is used for reading
// config.json, making the model, loading and saving, tensor-parallel plans and GGUF conversion. Rows are constants;
// thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/nn/options.h"

namespace tessera {

class CausalLM;
class GgufFile;
class GgufWriter;
class JsonReader;
struct ModelConfig;

// Selects the projections that have a bias.
enum class BiasKeys : uint8_t {
  kNone,
  kAttentionAndMlp,  // according to the keys attention_bias and mlp_bias
  kAttention,        // according to the key attention_bias
  kQueryKeyValue     // always q, k and v
};

// Selects the layers with a sliding window.
struct WindowKeys {
  bool has_window_key = false;       // the family has the key sliding_window; null in it means that no layer slides
  bool has_use_window_key = false;   // layers slide only when use_sliding_window is true
  int64_t default_window = 4096;     // value of sliding_window when the key is missing
  bool has_layer_types_key = false;  // the key layer_types lists the sliding layers
  bool is_required = false;          // a null sliding_window is an error when layers slide
  // For a config.json without layer_types: returns whether a layer has a sliding window. Null: all layers have one.
  bool (*layer_slides)(const JsonReader& config, int64_t layer) = nullptr;
};

// The keys of config.json that the family has, and their defaults in the configuration class of transformers.
struct ConfigKeys {
  int64_t vocab_size = 32000;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 32;
  int64_t num_attention_heads = 32;
  // The default of num_key_value_heads is the smaller of this number and num_attention_heads. 0: the default is
  // num_attention_heads.
  int64_t max_key_value_heads = 0;
  int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  int64_t max_position_embeddings = 0;
  std::string_view activation = "silu";
  std::string_view activation_key = "hidden_act";
  bool tie_word_embeddings = false;
  BiasKeys biases = BiasKeys::kNone;
  WindowKeys windows{};
  std::optional<int64_t> bos_token_id{};
  std::optional<int64_t> eos_token_id{};
  std::optional<int64_t> pad_token_id{};
  std::string_view text_config{};  // name of the object with these keys; empty: the top level of the file
  // Reads keys that only this family has. `text` is the object with the keys of ConfigKeys, `top` is the top level of
  // config.json.
  void (*read_extra)(const JsonReader& text, const JsonReader& top, ModelConfig& config) = nullptr;
  // Whether `read_extra` also reads the rotary settings. False: they are read from the common keys rope_theta,
  // rope_scaling and rope_parameters.
  bool reads_rope = false;
};

// The tensor-parallel plan of the family.
struct PlanKeys {
  std::string_view name{};                 // name of the family's plans in parallel/
  std::string_view base_module = "model";  // path of the module with embed_tokens, layers, norm and rotary_emb
  // transformers' own plan, a map from FQN patterns to styles: `top` is _tp_plan of the class, `layers` is
  // base_model_tp_plan of the configuration, whose patterns are relative to `base_module`.
  struct Style {
    std::string_view pattern, style;
  };
  std::vector<Style> top{};
  std::vector<Style> layers{};
};

// Names of the parameters in files, where these differ from the model's names.
struct WeightMap {
  struct Prefix {
    std::string_view ours, theirs;
  };
  std::vector<Prefix> prefixes{};
  // A stack of expert weights: parameters [experts, rows, columns] whose names end in `parameter`, such as
  // ".experts.gate_up_proj". A file may have, for each expert M, the tensors ".experts.M." + each of `tensors`, which
  // are equal parts of the expert's rows in this order. Stacked parameters are saved as these tensors.
  struct ExpertStack {
    std::string_view parameter;
    std::vector<std::string_view> tensors;
  };
  std::vector<ExpertStack> stacks{};
  // Prefixes of tensors that are in files but not in the model, such as a vision tower. Saving copies these tensors
  // unchanged from the source folder.
  std::vector<std::string_view> unowned_prefixes{};
  // Returns the names that a parameter may have in a file, most likely name first. The parameter is saved under the
  // first name. The last name lacks the prefix "model.", as in files that were saved from the model without head;
  // transformers also loads such files.
  std::vector<std::string> names_of(const std::string& parameter) const;
  bool is_unowned(std::string_view name) const;
};

// How GGUF files store a model of the family. See gguf/gguf_tensors.h.
struct GgufMap {
  // The value of the key general.architecture in GGUF files. When families share a value, a GGUF file with this value
  // becomes a model of the first of these families. Empty: the family cannot be converted from or to GGUF.
  std::string_view architecture{};
  bool interleaved_rotary = false;  // llama.cpp stores the rows of q and k in another order
  bool qk_norm = false;             // the tensors attn_q_norm and attn_k_norm exist
  bool has_post_norms = false;      // the tensors post_attention_norm and post_ffw_norm exist
  bool norms_plus_one = false;      // norm weights are stored with 1 added
  bool experts = false;             // every layer has ffn_gate_inp, ffn_gate_exps, ffn_up_exps and ffn_down_exps
  bool windows = false;             // set_keys writes which layers have a window; false: a file cannot express this
  // set_keys writes to a GGUF file the metadata that only this family has. read_keys reads this metadata and adds it to
  // the config.json that is made from the GGUF file. Errors kConfig, kFormat.
  void (*set_keys)(const ModelConfig& config, const std::string& where, GgufWriter& writer) = nullptr;
  void (*read_keys)(const GgufFile& file, nlohmann::ordered_json& config) = nullptr;
};

struct ModelFamily {
  std::string_view architecture;  // in config.json
  // Value of model_type in config.json, by which transformers selects the model. This library uses it when
  // architectures is missing.
  std::string_view model_type;
  std::string_view other_model_type{};  // a second model_type with the same model; may be empty
  ConfigKeys config;
  std::shared_ptr<CausalLM> (*make)(const ModelConfig& config, const nn::ParameterOptions& options) = nullptr;
  PlanKeys plan{};
  WeightMap weights{};
  GgufMap gguf{};
};

const std::vector<const ModelFamily*>& model_families();

// These functions return null for an unknown name. find_family_of_gguf returns the family to which a GGUF file with
// this general.architecture is converted.
const ModelFamily* find_family(std::string_view architecture);
const ModelFamily* find_family_of_type(std::string_view model_type);
const ModelFamily* find_family_of_gguf(std::string_view gguf_architecture);
const ModelFamily& family_of(std::string_view architecture);
// Returns the architecture (or model_type) in the folder's config.json when no family has it, else nullopt. Error
// kFormat for text that is not a config.json.
std::optional<std::string> unknown_architecture(const std::filesystem::path& dir);

}  // namespace tessera
