#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/formats/gguf/gguf_writer.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/models/config/config.h"
#include "tessera/models/config/family.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/models/gguf/gguf_rope.h"
#include "tessera/models/gguf/gguf_tensors.h"
#include "tessera/models/gguf/gguf_tokenizer.h"
#include "tessera/models/tensors/model_parameters.h"

namespace tessera {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";

const ModelFamily& gguf_family(const ModelConfig& config, const std::string& where) {
  const auto& family = family_of(config.architecture);
  if (!family.gguf.architecture.empty()) return family;
  std::vector<std::string_view> known;
  for (const auto* each : model_families()) {
    if (!each->gguf.architecture.empty()) known.push_back(each->architecture);
  }
  raise(ErrorKind::kConfig, "[gguf] {}: a {} cannot be written as GGUF in this version. Supported: {}.", where,
        config.architecture, fmt::join(known, ", "));
}

uint32_t file_type(GgmlType type) {
  static const std::map<GgmlType, uint32_t> kFileTypes = {
      {GgmlType::kF32, 0}, {GgmlType::kF16, 1}, {GgmlType::kQ8_0, 7}, {GgmlType::kBF16, 32}};
  const auto found = kFileTypes.find(type);
  TESSERA_CHECK(found != kFileTypes.end(), ErrorKind::kConfig,
                "[gguf] tensors can be written as f32, f16, bf16 or q8_0 only");
  return found->second;
}

void set_model_keys(const ModelConfig& config, const ModelFamily& family, const std::string& where,
                    GgufWriter& writer) {
  const std::string architecture(family.gguf.architecture);
  const auto number = [&](const char* key, int64_t value) {
    writer.set(architecture + "." + key, static_cast<uint32_t>(value));
  };
  number("vocab_size", config.vocab_size);
  number("context_length", config.max_position_embeddings);
  number("embedding_length", config.hidden_size);
  number("block_count", config.num_hidden_layers);
  number("feed_forward_length", config.intermediate_size);
  number("attention.head_count", config.num_attention_heads);
  number("attention.head_count_kv", config.num_key_value_heads);
  number("attention.key_length", config.head_dim);
  number("attention.value_length", config.head_dim);
  number("rope.dimension_count", config.head_dim);
  writer.set(architecture + ".attention.layer_norm_rms_epsilon", static_cast<float>(config.rms_norm_eps));
  set_rope_keys(config.rope, architecture, where, writer);
  if (family.gguf.set_keys) family.gguf.set_keys(config, where, writer);
  if (!family.gguf.windows && config.sliding_window > 0 && config.sliding_window < config.max_position_embeddings) {
    log_warning(
        "[gguf] {}: GGUF has no sliding window for {}; the file gives correct results for sequences of up to {} tokens",
        where, family.architecture, config.sliding_window);
  }
}

// A GGUF file has no key for the activation; readers derive it from the architecture. The config must therefore have
// the family's default.
void check_activation(const ModelConfig& config, const ModelFamily& family, const std::string& where) {
  const auto usual = family.config.activation == "silu" ? nn::Activation::kSilu : nn::Activation::kGeluTanh;
  TESSERA_CHECK(config.activation == usual, ErrorKind::kConfig,
                "[gguf] {}: {} is not {}, which the GGUF of a {} implies", where, family.config.activation_key,
                family.config.activation, family.architecture);
}

// Returns the folder's tensors from which a tensor of the file is made: one tensor, or one tensor per expert. A tied
// embedding may be stored under the head's name only.
std::vector<std::string> stored_names(const SafetensorsFolder& folder, const ModelConfig& config,
                                      const GgufTensor& tensor) {
  SharedParameter parameter{{}, {tensor.hf_name}, {}};
  if (config.tie_word_embeddings && tensor.hf_name == kEmbedding) parameter.names.emplace_back("lm_head.weight");
  const auto names = file_names(family_of(config.architecture).weights, parameter);
  const auto is_stored = [&](const std::string& name) { return folder.contains(name); };
  const auto found = std::ranges::find_if(names, is_stored);
  if (tensor.stacks == nullptr || found != names.end()) return {found == names.end() ? names.front() : *found};
  for (const auto& name : names) {
    if (auto experts = names_of_experts(tensor, name); is_stored(experts.front())) return experts;
  }
  return names_of_experts(tensor, tensor.hf_name);
}

// Returns the value of one tensor of the GGUF file that is being written, read from the Hugging Face folder. If the
// GGUF tensor holds the experts of a layer, the value is the stack of these experts, [experts, rows, columns].
at::Tensor folder_value(const SafetensorsFolder& folder, const ModelConfig& config, const GgufTensor& tensor) {
  std::vector<at::Tensor> parts;
  const auto names = stored_names(folder, config, tensor);
  for (const auto& name : names) parts.push_back(folder.tensor(name));
  if (tensor.stacks == nullptr) return parts.front();
  // The experts are stored in one tensor [experts, rows, columns], or each in its own tensor.
  return parts.front().dim() == 3 ? parts.front().narrow(1, tensor.first_row, tensor.shape[1]).contiguous()
                                  : at::stack(parts);
}

GgmlType stored_type(const GgufTensor& tensor, GgmlType type) {
  if (tensor.shape.size() == 1 || tensor.router) return GgmlType::kF32;
  // Rows that cannot be divided into blocks of 32 become F16, as in llama.cpp's own converter.
  return type == GgmlType::kQ8_0 && tensor.shape.back() % 32 != 0 ? GgmlType::kF16 : type;
}

// Returns the narrowest of F16, BF16 and F32 that represents every matrix of the folder exactly; F32 if a matrix is
// float64.
GgmlType type_of_folder(const SafetensorsFolder& folder, const ModelConfig& config,
                        const std::vector<GgufTensor>& tensors) {
  auto dtype = folder.entry(stored_names(folder, config, tensors.front()).front()).dtype;  // dtype of the embedding
  for (const auto& tensor : tensors) {
    if (tensor.shape.size() == 1 || tensor.router) continue;  // always F32
    for (const auto& name : stored_names(folder, config, tensor)) {
      dtype = c10::promoteTypes(dtype, folder.entry(name).dtype);
    }
  }
  return dtype == at::kBFloat16 ? GgmlType::kBF16 : dtype == at::kHalf ? GgmlType::kF16 : GgmlType::kF32;
}

// Throws for values that are not finite, or would not be finite in the file. q8_0 has a float16 scale for each block of
// 32 values, so its largest value is 65504 * 127.
void check_storable(const at::Tensor& value, GgmlType type, const std::string& name, const std::string& dir) {
  const auto where = "[gguf] " + dir;
  check_converted(value, value.to(plain_dtype(type).value_or(value.scalar_type())), name, where);
  if (type != GgmlType::kQ8_0) return;
  constexpr double kLargest = 65504.0 * 127;
  const double most = value.abs().max().item<double>();
  TESSERA_CHECK(most <= kLargest, ErrorKind::kFormat,
                "{}: tensor {} holds {}, beyond the range of q8_0, which ends at {}. Use f32 or bf16.", where,
                quote(name), most, kLargest);
}

// Returns the value of the GGUF key general.name: _name_or_path of config.json, else the name of the folder.
std::string general_name(const std::filesystem::path& dir) {
  const auto json = read_json_object(dir / "config.json");
  const auto folder = std::filesystem::absolute(dir / "x").lexically_normal().parent_path().filename().string();
  return JsonReader(json, "[gguf] " + (dir / "config.json").string()).string("_name_or_path", folder);
}

}  // namespace

void folder_to_gguf(const std::filesystem::path& dir, const std::filesystem::path& gguf,
                    const GgufExportOptions& options) {
  TESSERA_CHECK(!std::filesystem::exists(gguf), ErrorKind::kIo,
                "[gguf] {}: exists already. Name a file that does not exist.", gguf.string());
  const auto where = (dir / "config.json").string();
  const auto config = ModelConfig::from_folder(dir);
  const auto& family = gguf_family(config, where);
  check_activation(config, family, where);
  GgufWriter writer(gguf);
  writer.set("general.architecture", std::string(family.gguf.architecture));
  writer.set("general.type", std::string("model"));
  writer.set("general.name", general_name(dir));
  // set_model_keys() raises an error for a setting that GGUF cannot express. Such a setting may also change which
  // tensors the folder has, and the error should name the setting, not a tensor. Therefore set_model_keys() is called
  // before check_pretrained(), which looks for tensors.
  set_model_keys(config, family, where, writer);

  check_pretrained(*make_model(config, {.dtype = at::kFloat, .device = at::kMeta}), dir, UnusedTensors::kRefuse);
  const auto folder = SafetensorsFolder::open(dir);
  const auto tensors = gguf_tensors(family.gguf, config);
  const auto type = options.type.value_or(type_of_folder(folder, config, tensors));
  writer.set("general.file_type", file_type(type));
  writer.set("general.quantization_version", uint32_t{2});
  set_tokenizer_keys(dir, config, writer);
  const auto divisors = llama3_divisors(config.rope, config.head_dim);
  // GGUF stores the headers of all tensors before the data, so announce() is called for every tensor before the first
  // write().
  if (!divisors.empty()) writer.announce("rope_freqs.weight", GgmlType::kF32, {static_cast<int64_t>(divisors.size())});
  for (const auto& tensor : tensors) writer.announce(tensor.gguf_name, stored_type(tensor, type), tensor.shape);
  if (!divisors.empty()) writer.write("rope_freqs.weight", at::tensor(divisors));
  for (const auto& tensor : tensors) {
    const auto value = folder_value(folder, config, tensor);
    check_storable(value, stored_type(tensor, type), tensor.hf_name, dir.string());
    writer.write(tensor.gguf_name, to_gguf(tensor, value));
  }
  writer.finish();
  log_info("[gguf] {}: {} tensors written to {}", dir.string(), tensors.size(), gguf.string());
}

}  // namespace tessera
