#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <charconv>
#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/log.h"
#include "tessera/base/quote.h"
#include "tessera/formats/gguf.h"
#include "tessera/formats/safetensors_writer.h"
#include "tessera/base/staged.h"
#include "tessera/models/detail/gguf_llama.h"
#include "tessera/models/detail/gguf_tokenizer.h"
#include "tessera/models/family.h"
#include "tessera/models/gguf_convert.h"

namespace tessera {
namespace {

using detail::LlamaShape;
using json = nlohmann::ordered_json;

// GGUF keeps float32; 1e-5 shall be written as that, not with the digits of its nearest float32.
double shortest(double value) {
  const auto narrow = static_cast<float>(value);
  if (static_cast<double>(narrow) != value) return value;
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, narrow).ptr;
  std::from_chars(text, end, value);
  return value;
}

int64_t whole(const GgufFile& file, const std::string& key) {
  const auto value = file.require_uint(key);
  TESSERA_CHECK(value <= (uint64_t{1} << 32), ErrorKind::kFormat, "[gguf] {}: {} is {}", file.path().string(), key,
                value);
  return static_cast<int64_t>(value);
}

int64_t whole_or(const GgufFile& file, const std::string& key, int64_t absent) {
  return file.find_uint(key) ? whole(file, key) : absent;
}

const ModelFamily& read_family(const GgufFile& file) {
  const auto name = file.find_string("general.architecture").value_or("");
  const auto* family = find_family_of_gguf(name);
  TESSERA_CHECK(family, ErrorKind::kConfig,
                "[gguf] {}: the architecture {} is not available in this version (llama is)", file.path().string(),
                quote(name));
  TESSERA_CHECK(file.find_uint("llama.expert_count").value_or(0) == 0, ErrorKind::kConfig,
                "[gguf] {}: a mixture of experts is not available in this version", file.path().string());
  return *family;
}

LlamaShape read_shape(const GgufFile& file) {
  const auto& embedding = file.tensor_info("token_embd.weight").shape;
  TESSERA_CHECK(embedding.size() == 2, ErrorKind::kFormat, "[gguf] {}: token_embd.weight has {} dimensions, wanted 2",
                file.path().string(), embedding.size());
  LlamaShape shape;
  shape.layers = whole(file, "llama.block_count");
  shape.hidden = whole(file, "llama.embedding_length");
  shape.ff = whole(file, "llama.feed_forward_length");
  shape.heads = whole(file, "llama.attention.head_count");
  shape.kv_heads = whole_or(file, "llama.attention.head_count_kv", shape.heads);
  TESSERA_CHECK(shape.heads > 0, ErrorKind::kFormat, "[gguf] {}: llama.attention.head_count is 0",
                file.path().string());
  shape.head_dim = whole_or(file, "llama.attention.key_length", shape.hidden / shape.heads);
  shape.vocab = embedding[0];
  shape.tied = !file.contains("output.weight");
  shape.attention_bias = file.contains("blk.0.attn_q.bias");
  shape.mlp_bias = file.contains("blk.0.ffn_gate.bias");
  detail::check_llama_shape(shape, file.path().string());
  const auto value_dim = whole_or(file, "llama.attention.value_length", shape.head_dim);
  const auto rotary_dim = whole_or(file, "llama.rope.dimension_count", shape.head_dim);
  TESSERA_CHECK(
      value_dim == shape.head_dim && rotary_dim == shape.head_dim, ErrorKind::kConfig,
      "[gguf] {}: heads of size {} with values of {} and {} rotated dimensions are not available in this version",
      file.path().string(), shape.head_dim, value_dim, rotary_dim);
  return shape;
}

// The rope_scaling entry of config.json, or null.
json rope_scaling(const GgufFile& file, double theta, int64_t head_dim) {
  const auto where = file.path().string();
  if (file.contains("rope_freqs.weight")) {
    const auto divisors = file.tensor("rope_freqs.weight").to(at::kFloat).contiguous();
    const float* first = divisors.const_data_ptr<float>();
    detail::Llama3Scaling scaling;
    TESSERA_CHECK(divisors.numel() == head_dim / 2 &&
                      detail::recover_llama3_scaling({first, first + divisors.numel()}, theta, scaling),
                  ErrorKind::kConfig, "[gguf] {}: rope_freqs.weight is no llama3 scaling that this version knows",
                  where);
    return {{"rope_type", "llama3"},
            {"factor", scaling.factor},
            {"low_freq_factor", scaling.low_freq_factor},
            {"high_freq_factor", scaling.high_freq_factor},
            {"original_max_position_embeddings", static_cast<int64_t>(scaling.original_context)}};
  }
  const auto type = file.find_string("llama.rope.scaling.type").value_or("none");
  if (type == "none") return nullptr;
  const double factor = shortest(file.find_float("llama.rope.scaling.factor").value_or(1.0));
  if (type == "linear") return {{"rope_type", "linear"}, {"factor", factor}};
  TESSERA_CHECK(type == "yarn", ErrorKind::kConfig, "[gguf] {}: the rope scaling {} is not available in this version",
                where, quote(type));
  json scaling = {{"rope_type", "yarn"}, {"factor", factor}};
  if (file.find_uint("llama.rope.scaling.original_context_length")) {
    scaling["original_max_position_embeddings"] = whole(file, "llama.rope.scaling.original_context_length");
  }
  // llama.cpp multiplies its own 1 + 0.1 ln(factor) by attn_factor, config.json holds the product.
  if (const auto attention = file.find_float("llama.rope.scaling.attn_factor")) {
    scaling["attention_factor"] = shortest(*attention) * (1 + 0.1 * std::log(factor));
  }
  if (const auto fast = file.find_float("llama.rope.scaling.yarn_beta_fast")) scaling["beta_fast"] = shortest(*fast);
  if (const auto slow = file.find_float("llama.rope.scaling.yarn_beta_slow")) scaling["beta_slow"] = shortest(*slow);
  return scaling;
}

const char* import_dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    default:
      raise(ErrorKind::kConfig, "[gguf] dtype {}: wanted float32, bfloat16 or float16", c10::toString(dtype));
  }
}

json model_config(const GgufFile& file, const ModelFamily& family, const LlamaShape& shape, c10::ScalarType dtype) {
  const double theta = shortest(file.find_float("llama.rope.freq_base").value_or(10000.0));
  json config = {{"architectures", json::array({family.architecture})},
                 {"model_type", family.model_type},
                 {"attention_bias", shape.attention_bias},
                 {"attention_dropout", 0.0},
                 {"head_dim", shape.head_dim},
                 {"hidden_act", "silu"},
                 {"hidden_size", shape.hidden},
                 {"initializer_range", 0.02},
                 {"intermediate_size", shape.ff},
                 {"max_position_embeddings", whole(file, "llama.context_length")},
                 {"mlp_bias", shape.mlp_bias},
                 {"num_attention_heads", shape.heads},
                 {"num_hidden_layers", shape.layers},
                 {"num_key_value_heads", shape.kv_heads},
                 {"rms_norm_eps", shortest(file.find_float("llama.attention.layer_norm_rms_epsilon").value_or(1e-6))},
                 {"rope_scaling", rope_scaling(file, theta, shape.head_dim)},
                 {"rope_theta", theta},
                 {"tie_word_embeddings", shape.tied},
                 {"torch_dtype", import_dtype_name(dtype)},
                 {"use_cache", true},
                 {"vocab_size", shape.vocab}};
  for (const auto& [name, key] :
       {std::pair("bos_token_id", "bos"), {"eos_token_id", "eos"}, {"pad_token_id", "padding"}}) {
    const auto id = file.find_uint(std::string("tokenizer.ggml.") + key + "_token_id");
    if (id && *id < static_cast<uint64_t>(shape.vocab)) config[name] = *id;
  }
  return config;
}

// Where generation stops and starts; a second end token (end of turn) makes the end a list.
json generation_config(const GgufFile& file, const json& config) {
  json result = {{"_from_model_config", true}};
  for (const char* name : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    if (config.contains(name)) result[name] = config[name];
  }
  json ends = json::array();
  if (config.contains("eos_token_id")) ends.push_back(config["eos_token_id"]);
  for (const char* key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    const auto id = file.find_uint(key);
    const bool valid = id && *id < config["vocab_size"].get<uint64_t>();
    if (valid && std::find(ends.begin(), ends.end(), json(*id)) == ends.end()) ends.push_back(*id);
  }
  if (ends.size() > 1) result["eos_token_id"] = ends;
  return result;
}

// float32 when any tensor is quantised, otherwise what holds every matrix without loss.
c10::ScalarType own_dtype(const GgufFile& file) {
  std::set<GgmlType> types;
  for (const auto& [name, info] : file.tensors()) {
    if (info.shape.size() > 1) types.insert(info.type);
  }
  if (types == std::set{GgmlType::kF16}) return at::kHalf;
  if (types == std::set{GgmlType::kBF16}) return at::kBFloat16;
  return at::kFloat;
}

// The file must hold what the architecture has, in these shapes, and nothing that would get lost.
void check_tensors(const GgufFile& file, const std::vector<detail::LlamaTensor>& wanted) {
  std::set<std::string_view> known = {"rope_freqs.weight"};
  for (const auto& tensor : wanted) {
    const auto& info = file.tensor_info(tensor.gguf_name);
    TESSERA_CHECK(info.shape == tensor.shape, ErrorKind::kFormat, "[gguf] {}: {} is [{}], its metadata wants [{}]",
                  file.path().string(), tensor.gguf_name, fmt::join(info.shape, ", "), fmt::join(tensor.shape, ", "));
    known.insert(tensor.gguf_name);
  }
  for (const auto& [name, info] : file.tensors()) {
    TESSERA_CHECK(known.contains(name), ErrorKind::kConfig,
                  "[gguf] {}: tensor {} has no place in a Llama model of this version", file.path().string(),
                  quote(name));
  }
}

}  // namespace

void gguf_to_folder(const std::filesystem::path& gguf, const std::filesystem::path& dir,
                    const GgufImportOptions& options) {
  const auto file = GgufFile::open(gguf);
  const auto& family = read_family(*file);
  const auto shape = read_shape(*file);
  const auto tensors = family.gguf_tensors(shape);
  check_tensors(*file, tensors);
  const auto dtype = options.dtype.value_or(own_dtype(*file));
  const auto config = model_config(*file, family, shape, dtype);

  StagedFolder folder(dir);
  publish_file(folder.path() / "config.json", detail::json_text(config, gguf.string(), 2));
  publish_file(folder.path() / "generation_config.json",
               detail::json_text(generation_config(*file, config), gguf.string(), 2));
  detail::write_tokenizer_files(*file, folder.path(), shape.vocab, config["max_position_embeddings"].get<int64_t>());
  std::vector<TensorSpec> specs;
  for (const auto& tensor : tensors) specs.push_back({tensor.hf_name, dtype, tensor.shape});
  SafetensorsFolderWriter writer(folder.path(), std::move(specs), {.max_shard_bytes = options.max_shard_bytes});
  for (const auto& tensor : tensors) {
    auto value = file->tensor(tensor.gguf_name);
    if (tensor.rotary_heads > 0) value = detail::split_rotary_rows(value, tensor.rotary_heads);
    writer.write(tensor.hf_name, value.to(dtype));
  }
  writer.finish();
  folder.publish();
  log_info("[gguf] {}: {} tensors written to {} as {}", gguf.string(), tensors.size(), dir.string(), import_dtype_name(dtype));
}

}  // namespace tessera
