#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/log.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/gguf/gguf.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/models/config/config.h"
#include "tessera/models/config/family.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/models/gguf/gguf_rope.h"
#include "tessera/models/gguf/gguf_tensors.h"
#include "tessera/models/gguf/gguf_tokenizer.h"

namespace tessera {
namespace {

using json = nlohmann::ordered_json;

// Reads metadata keys that begin with the file's general.architecture, such as "llama.block_count".
class GgufKeys {
 public:
  explicit GgufKeys(const GgufFile& file)
      : file_(file), architecture_(file.find_string("general.architecture").value_or("")) {}

  const GgufFile& file() const { return file_; }
  const std::string& architecture() const { return architecture_; }
  std::string where() const { return file_.path().string(); }
  std::string key(const char* name) const { return architecture_ + "." + name; }
  int64_t integer(const char* name) const {
    const auto value = file_.require_uint(key(name));
    TESSERA_CHECK(value <= (uint64_t{1} << 32), ErrorKind::kFormat, "[gguf] {}: {} is {}", where(), key(name), value);
    return static_cast<int64_t>(value);
  }
  // Returns the value of the metadata key key(name). Error kFormat unless the value is between 1 and `max_value`.
  int64_t positive_integer(const char* name, int64_t max_value) const {
    const int64_t value = integer(name);
    TESSERA_CHECK(value >= 1 && value <= max_value, ErrorKind::kFormat, "[gguf] {}: {} is {}, wanted 1 to {}", where(),
                  key(name), value, max_value);
    return value;
  }
  int64_t integer_or(const char* name, int64_t absent) const {
    return file_.find_uint(key(name)) ? integer(name) : absent;
  }
  double number_or(const char* name, double absent) const {
    return shortest_decimal(file_.find_float(key(name)).value_or(absent));
  }

 private:
  const GgufFile& file_;
  std::string architecture_;
};

const ModelFamily& imported_family(const GgufKeys& keys) {
  const auto* family = find_family_of_gguf(keys.architecture());
  if (!family) {
    std::set<std::string_view> known;
    for (const auto* each : model_families()) {
      if (!each->gguf.architecture.empty()) known.insert(each->gguf.architecture);
    }
    raise(ErrorKind::kConfig, "[gguf] {}: the architecture {} is not supported by this version. Supported: {}.",
          keys.where(), quote(keys.architecture()), fmt::join(known, ", "));
  }
  const int64_t experts = keys.integer_or("expert_count", 0);
  TESSERA_CHECK(experts == 0 || family->gguf.experts, ErrorKind::kConfig,
                "[gguf] {}: a mixture of {} experts with the architecture {} is not supported by this version",
                keys.where(), experts, quote(keys.architecture()));
  TESSERA_CHECK(experts > 0 || !family->gguf.experts, ErrorKind::kFormat,
                "[gguf] {}: {} is 0, wanted the number of experts of each layer", keys.where(),
                keys.key("expert_count"));
  return *family;
}

int64_t vocabulary_rows(const GgufFile& file) {
  const auto& embedding = file.tensor_info("token_embd.weight").shape;
  TESSERA_CHECK(embedding.size() == 2 && embedding[0] <= (int64_t{1} << 24), ErrorKind::kFormat,
                "[gguf] {}: token_embd.weight is [{}], wanted [vocabulary, hidden size]", file.path().string(),
                fmt::join(embedding, ", "));
  return embedding[0];
}

struct GgufHeads {
  int64_t heads, kv_heads, size;
};

GgufHeads read_heads(const GgufKeys& keys, int64_t hidden) {
  constexpr int64_t kMost = 65536;
  GgufHeads heads{keys.positive_integer("attention.head_count", kMost), 0, 0};
  heads.kv_heads = keys.integer_or("attention.head_count_kv", heads.heads);
  heads.size = keys.integer_or("attention.key_length", hidden / heads.heads);
  const bool divides = heads.kv_heads >= 1 && heads.heads % heads.kv_heads == 0;
  TESSERA_CHECK(divides && heads.size >= 2 && heads.size <= kMost && heads.size % 2 == 0, ErrorKind::kFormat,
                "[gguf] {}: found {} heads, {} key/value heads and head size {}: the heads must be a multiple of the "
                "key/value heads, and the head size even and from 2 to 65536",
                keys.where(), heads.heads, heads.kv_heads, heads.size);
  const auto value_size = keys.integer_or("attention.value_length", heads.size);
  const auto rotated = keys.integer_or("rope.dimension_count", heads.size);
  TESSERA_CHECK(value_size == heads.size && rotated == heads.size, ErrorKind::kConfig,
                "[gguf] {}: heads of size {} with values of size {} and {} rotary dims are not supported by this "
                "version",
                keys.where(), heads.size, value_size, rotated);
  return heads;
}

// Makes the config.json of the folder. Biases and tied embeddings are derived from the tensors in the file.
json config_of(const GgufKeys& keys, const ModelFamily& family, c10::ScalarType dtype) {
  constexpr int64_t kMostWidth = int64_t{1} << 24;
  const auto& file = keys.file();
  const int64_t hidden = keys.positive_integer("embedding_length", kMostWidth), vocab = vocabulary_rows(file);
  const auto heads = read_heads(keys, hidden);
  const double theta = keys.number_or("rope.freq_base", 10000.0);
  json config = {{"architectures", json::array({family.architecture})},
                 {"model_type", family.model_type},
                 {"attention_bias", file.contains("blk.0.attn_q.bias")},
                 {"attention_dropout", 0.0},
                 {"head_dim", heads.size},
                 {family.config.activation_key, family.config.activation},
                 {"hidden_size", hidden},
                 {"initializer_range", 0.02},
                 {"intermediate_size", keys.positive_integer("feed_forward_length", kMostWidth)},
                 {"max_position_embeddings", keys.integer("context_length")},
                 {"mlp_bias", file.contains("blk.0.ffn_gate.bias")},
                 {"num_attention_heads", heads.heads},
                 {"num_hidden_layers", keys.positive_integer("block_count", 4096)},
                 {"num_key_value_heads", heads.kv_heads},
                 {"rms_norm_eps", keys.number_or("attention.layer_norm_rms_epsilon", 1e-6)},
                 {"rope_scaling", rope_scaling(file, keys.architecture(), theta, heads.size)},
                 {"rope_theta", theta},
                 {"tie_word_embeddings", !file.contains("output.weight")},
                 {"torch_dtype", dtype_name(dtype)},
                 {"use_cache", true},
                 {"vocab_size", vocab}};
  for (const auto& [name, key] :
       {std::pair("bos_token_id", "bos"), {"eos_token_id", "eos"}, {"pad_token_id", "padding"}}) {
    const auto id = file.find_uint(std::string("tokenizer.ggml.") + key + "_token_id");
    if (id && *id < static_cast<uint64_t>(vocab)) config[name] = *id;
  }
  if (family.gguf.read_keys) family.gguf.read_keys(file, config);
  return config;
}

// Makes generation_config.json: the tokens at which generation starts and stops. Several end tokens become a list.
json generation_config(const GgufFile& file, const json& config) {
  json result = {{"_from_model_config", true}};
  for (const char* name : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    if (config.contains(name)) result[name] = config[name];
  }
  const auto ends = gguf_end_tokens(file, config["vocab_size"].get<int64_t>());
  if (ends.size() == 1) result["eos_token_id"] = ends.front();
  if (ends.size() > 1) result["eos_token_id"] = ends;
  return result;
}

// Logs a warning with end tokens that llama.cpp recognises by their text (is_known_end) and that no key of the file
// lists.
void warn_of_unnamed_ends(const GgufFile& file, const json& config) {
  const auto* tokens = file.find_strings("tokenizer.ggml.tokens");
  std::vector<std::string> unnamed;
  for (const uint64_t id : gguf_end_tokens(file, config["vocab_size"].get<int64_t>())) {
    const auto is_key = [&](const char* key) { return file.find_uint(key) == id; };
    const bool named = is_key("tokenizer.ggml.eos_token_id") || is_key("tokenizer.ggml.eot_token_id") ||
                       is_key("tokenizer.ggml.eom_token_id");
    if (!named) unnamed.push_back(fmt::format("{} ({})", quote(tokens->at(id)), id));
  }
  if (unnamed.empty()) return;
  log_warning("[gguf] {}: texts end at {}, too, which no key of the file lists, as in llama.cpp", file.path().string(),
              fmt::join(unnamed, ", "));
}

// Returns the dtype of the folder: float32 when a tensor is quantised or the matrices have several types, otherwise the
// type of the matrices. Routers are always stored as F32. If the matrices' type cannot represent a router's values
// exactly, the result is float32.
c10::ScalarType folder_dtype(const GgufFile& file) {
  constexpr std::string_view kRouter = ".ffn_gate_inp.weight";
  std::set<GgmlType> types;
  for (const auto& [name, info] : file.tensors()) {
    if (info.shape.size() > 1 && !name.ends_with(kRouter)) types.insert(info.type);
  }
  const auto dtype = types.size() == 1 ? plain_dtype(*types.begin()).value_or(at::kFloat) : at::kFloat;
  for (const auto& [name, info] : file.tensors()) {
    if (dtype == at::kFloat || !name.ends_with(kRouter)) continue;
    const auto value = file.tensor(name).to(at::kFloat);
    if (!value.to(dtype).to(at::kFloat).equal(value)) return at::kFloat;
  }
  return dtype;
}

// The file must have all tensors of the architecture in their shapes, and no other tensors, which the conversion would
// lose.
void check_file_tensors(const GgufFile& file, const std::vector<GgufTensor>& expected_tensors) {
  std::set<std::string_view> known = {"rope_freqs.weight"};
  for (const auto& tensor : expected_tensors) {
    const auto& info = file.tensor_info(tensor.gguf_name);
    TESSERA_CHECK(info.shape == tensor.shape, ErrorKind::kFormat,
                  "[gguf] {}: {} has shape [{}], but the file's metadata give [{}]", file.path().string(),
                  tensor.gguf_name, fmt::join(info.shape, ", "), fmt::join(tensor.shape, ", "));
    known.insert(tensor.gguf_name);
  }
  for (const auto& [name, info] : file.tensors()) {
    TESSERA_CHECK(known.contains(name), ErrorKind::kConfig,
                  "[gguf] {}: tensor {} does not belong to this model in this version, and would be lost",
                  file.path().string(), quote(name));
  }
}

// If `tensor` has the stacked experts of a layer, returns the names that the experts' tensors have in the model folder.
// Otherwise returns an empty list.
std::vector<std::string> names_in_folder(const GgufTensor& tensor) {
  return tensor.stacks == nullptr ? std::vector<std::string>() : names_of_experts(tensor, tensor.hf_name);
}

// A GGUF file with the config that its metadata give. The constructor checks that the file has exactly the tensors of
// that config.
class GgufModel {
 public:
  GgufModel(const std::filesystem::path& path, std::optional<c10::ScalarType> wanted_dtype)
      : file(GgufFile::open(path)), dtype(wanted_dtype.value_or(folder_dtype(*file))) {
    const GgufKeys keys(*file);
    const auto& family = imported_family(keys);
    TESSERA_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, ErrorKind::kConfig,
                  "[gguf] dtype {}: wanted float32, bfloat16 or float16", c10::toString(dtype));
    config_ = config_of(keys, family, dtype);
    config_text_ = json_text(config_, path.string(), 2);
    parsed_ = ModelConfig::parse(config_text_, path.string());
    tensors = gguf_tensors(family.gguf, parsed_);
    check_file_tensors(*file, tensors);
  }

  // Writes all files of the folder except the weights.
  void write_companions(const std::filesystem::path& folder) const {
    publish_file(folder / "config.json", config_text_);
    publish_file(folder / "generation_config.json",
                 json_text(generation_config(*file, config_), file->path().string(), 2));
    write_tokenizer_files(*file, folder, parsed_.vocab_size, parsed_.max_position_embeddings);
    warn_of_unnamed_ends(*file, config_);
  }

  std::shared_ptr<const GgufFile> file;
  c10::ScalarType dtype;
  std::vector<GgufTensor> tensors;

 private:
  json config_;
  std::string config_text_;
  ModelConfig parsed_;
};

}  // namespace

void gguf_to_linked_folder(const std::filesystem::path& gguf, const std::filesystem::path& dir) {
  const GgufModel model(gguf, std::nullopt);
  StagedFolder folder(dir);
  model.write_companions(folder.path());
  std::filesystem::create_symlink(std::filesystem::canonical(gguf), folder.path() / kLinkedGguf);
  folder.publish();
}

void gguf_to_folder(const std::filesystem::path& gguf, const std::filesystem::path& dir,
                    const GgufImportOptions& options) {
  const GgufModel model(gguf, options.dtype);
  const auto& file = model.file;
  const auto dtype = model.dtype;
  const auto& tensors = model.tensors;

  StagedFolder folder(dir);
  model.write_companions(folder.path());
  std::vector<SafetensorsSpec> specs;
  for (const auto& tensor : tensors) {
    if (tensor.stacks == nullptr) specs.push_back({tensor.hf_name, dtype, tensor.shape});
    for (const auto& name : names_in_folder(tensor)) specs.push_back({name, dtype, {tensor.shape[1], tensor.shape[2]}});
  }
  SafetensorsFolderWriter writer(folder.path(), std::move(specs), {.max_shard_bytes = options.max_shard_bytes});
  for (const auto& tensor : tensors) {
    // Decode, convert and write one tensor at a time. Stacked experts are split into one tensor per expert.
    const auto stored = file->tensor(tensor.gguf_name);
    const auto value = from_gguf(tensor, stored).to(dtype);
    if (find_non_finite(value)) check_converted(stored, stored.to(dtype), tensor.gguf_name, "[gguf] " + gguf.string());
    if (tensor.stacks == nullptr) writer.write(tensor.hf_name, value);
    int64_t expert = 0;
    for (const auto& name : names_in_folder(tensor)) writer.write(name, value[expert++]);
  }
  writer.finish();
  folder.publish();
  log_info("[gguf] {}: {} tensors written to {} as {}", gguf.string(), tensors.size(), dir.string(), dtype_name(dtype));
}

}  // namespace tessera
