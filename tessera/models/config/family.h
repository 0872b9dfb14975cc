// What makes a family of models: one row each, beside its model.
//
//   const ModelFamily& family = family_of("MistralForCausalLM");     // Error kFormat lists those that there are
//   std::shared_ptr<CausalLM> model = family.make(config, options);
//
// A new family is its model file with its row, named in model_families(): reading config.json, making the model,
// loading and saving, plans of tensor parallelism and converting GGUF files look here. Rows are constants; thread-safe.
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

// Which projections have a bias.
enum class BiasKeys : uint8_t {
  kNone,
  kAttentionAndMlp,  // as attention_bias and mlp_bias say
  kAttention,        // as attention_bias says
  kQueryKeyValue     // q, k and v, always
};

// Which layers see a sliding window.
struct WindowKeys {
  bool known = false;        // sliding_window is a key of this family; null: no layer slides
  bool switched = false;     // only where use_sliding_window is true
  int64_t missing = 4096;    // sliding_window where it is left out
  bool layer_types = false;  // layer_types says which layers slide
  bool required = false;     // null of sliding_window is an error where layers slide
  // Where layer_types is left out. Null: all layers.
  bool (*slides)(const JsonReader& config, int64_t layer) = nullptr;
};

// What the configuration class of transformers takes where config.json leaves a key out, and which keys it knows.
struct ConfigKeys {
  int64_t vocab_size = 32000;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 32;
  int64_t num_attention_heads = 32;
  int64_t most_key_value_heads =
      0;                 // num_key_value_heads is this or the number of heads, whichever is less; 0: the latter
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
  std::string_view text_config{};  // the object that holds these keys; empty: the file itself
  // What is the family's own; `text` holds the keys above, `top` is the file.
  void (*more)(const JsonReader& text, const JsonReader& top, ModelConfig& config) = nullptr;
  // Whether `more` reads rotary settings, too, in place of the common keys.
  bool own_rope = false;
};

// How tensor parallelism cuts the family.
struct PlanKeys {
  std::string_view name{};           // of the plans in parallel/ that are written for it
  std::string_view inner = "model";  // path of the child that holds embed_tokens, layers, norm and rotary_emb
  // transformers' own plan, FQN pattern -> style: _tp_plan of the class, and base_model_tp_plan of the configuration,
  // whose patterns begin at `inner`.
  struct Style {
    std::string_view pattern, style;
  };
  std::vector<Style> top{};
  std::vector<Style> layers{};
};

// What files call the parameters, where not by their own names.
struct WeightMap {
  struct Prefix {
    std::string_view ours, theirs;
  };
  std::vector<Prefix> prefixes{};
  // Parameters of stacked experts [experts, rows, columns] whose names end in `parameter`, ".experts.gate_up_proj": a
  // file may hold for each expert M the tensors ".experts.M." + tensors, equal parts of its rows one after another. So
  // they are saved.
  struct Stack {
    std::string_view parameter;
    std::vector<std::string_view> tensors;
  };
  std::vector<Stack> stacks{};
  std::vector<std::string_view> foreign{};  // beginnings of tensors that the model does not own: saved as they were
  // The names under which a file may hold the parameter, likeliest first: the first is what is saved, the last has no
  // "model." in front, as files of the model without head, which transformers loads, too.
  std::vector<std::string> names_of(const std::string& parameter) const;
  bool is_foreign(std::string_view name) const;
};

// The same model in GGUF. See detail/gguf_tensors.h.
struct GgufMap {
  std::string_view architecture{};  // general.architecture. Where families share one, a file becomes a model of the
                                    // first. Empty: cannot be converted
  bool interleaved_rotary = false;  // llama.cpp stores the rows of q and k in another order
  bool qk_norm = false;             // attn_q_norm, attn_k_norm
  bool norms_around = false;        // post_attention_norm, post_ffw_norm
  bool norms_one_plus = false;      // norms are stored with 1 added
  bool experts = false;             // in every layer: ffn_gate_inp, ffn_gate_exps, ffn_up_exps, ffn_down_exps
  bool windows = false;             // set_keys says which layers slide; else a file cannot say it
  // Metadata of the family's own, into the file and into the config.json that is made of it. Errors kConfig, kFormat.
  void (*set_keys)(const ModelConfig& config, const std::string& where, GgufWriter& writer) = nullptr;
  void (*read_keys)(const GgufFile& file, nlohmann::ordered_json& config) = nullptr;
};

struct ModelFamily {
  std::string_view architecture;        // in config.json
  std::string_view model_type;          // the same, where architectures is left out; transformers chooses by it
  std::string_view other_model_type{};  // another one that gives the same model; may be empty
  ConfigKeys config;
  std::shared_ptr<CausalLM> (*make)(const ModelConfig& config, const nn::ParameterOptions& options) = nullptr;
  PlanKeys plan{};
  WeightMap weights{};
  GgufMap gguf{};
};

const std::vector<const ModelFamily*>& model_families();

// Null for one that is not there; of a GGUF architecture, the family that such a file becomes.
const ModelFamily* find_family(std::string_view architecture);
const ModelFamily* find_family_of_type(std::string_view model_type);
const ModelFamily* find_family_of_gguf(std::string_view gguf_architecture);
const ModelFamily& family_of(std::string_view architecture);
// The architecture (or model_type) that config.json in the folder names, where no family has it; none: ModelConfig
// reads the file. Error kFormat for text that is no config.json.
std::optional<std::string> unknown_architecture(const std::filesystem::path& dir);

}  // namespace tessera
