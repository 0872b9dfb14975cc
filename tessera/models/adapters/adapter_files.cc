#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/tensors/model_parameters.h"
#include "tessera/models/tensors/stage_parameters.h"

namespace tessera {
namespace {

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char *kWeightsFile = "adapter_model.safetensors", *kTorchFile = "adapter_model.bin";
constexpr const char* kPeftPrefix = "base_model.model.";
constexpr double kMostAlpha = 1e9;

// Returns the name of an adapter's parameter in PEFT's files. PEFT saves DoRA's magnitude as "lora_magnitude_vector",
// without the ".weight" that the parameter has in this library's LoraMagnitude module.
std::string peft_name(const std::string& own) {
  const std::string suffix = ".lora_magnitude_vector.weight";
  return kPeftPrefix + (own.ends_with(suffix) ? own.substr(0, own.size() - std::string(".weight").size()) : own);
}

// Whether a value of adapter_config.json means that the setting is not used: null, false, or an empty list or object.
bool is_neutral(const Json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) || (value.is_structured() && value.empty());
}

// PEFT accepts "all-linear" in upper and lower case.
bool is_all_linear(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text == "all-linear";
}

// Throws kConfig for settings of adapter_config.json that change the result and that this version does not implement.
void check_plain_lora(const JsonReader& top) {
  for (const char* key :
       {"fan_in_fan_out", "modules_to_save", "layers_to_transform", "rank_pattern", "alpha_pattern", "exclude_modules",
        "target_parameters", "trainable_token_indices", "layer_replication", "lora_bias", "use_qalora",
        "alora_invocation_tokens", "arrow_config", "velora_config", "use_bdlora"}) {
    const auto found = top.value().find(key);
    if (found == top.value().end() || is_neutral(*found)) continue;
    raise(ErrorKind::kConfig,
          "{}: {}: found {}, wanted none: this version has plain LoRA and DoRA only. Merge the adapter with PEFT "
          "(merge_and_unload) and start from the result.",
          top.name(), key, describe(*found));
  }
  const auto bias = top.string("bias", "none");
  if (bias != "none") top.at("bias").fail("none: this version does not train biases together with adapters");
  const auto init = top.find("init_lora_weights");
  if (!init || init->value().is_boolean()) return;
  static const std::set<std::string> kKeepBase = {"gaussian", "eva", "orthogonal"};
  const auto init_name = init->as_string();
  if (!kKeepBase.contains(init_name)) {
    init->fail("true, false, gaussian, eva or orthogonal: others change the base's weights");
  }
}

// Reads target_modules. In PEFT a string is a regular expression for whole module paths, and a list contains names of
// modules.
void read_targets(const JsonReader& top, AdapterConfig& config) {
  const auto found = top.find("target_modules");
  if (!found) raise(ErrorKind::kFormat, "{}: target_modules is missing", top.name());
  if (!found->is_array()) {
    const auto text = found->as_string();
    if (is_all_linear(text)) return;
    config.target_modules = {text};
    config.target_syntax = TargetSyntax::kPeftPattern;
    return;
  }
  config.target_modules.clear();
  for (const auto& item : found->items()) config.target_modules.push_back(item.as_string());
  config.target_syntax = TargetSyntax::kPeftNames;
}

// Opens the weights in any format. For an older torch.save file, which is not a zip archive, the error says how to
// convert it.
std::shared_ptr<const TensorFiles> open_adapter_weights(const std::filesystem::path& file) {
  try {
    return TensorFiles::open(file);
  } catch (const Error& error) {
    if (file.filename() != kTorchFile) throw;
    raise(error.kind(),
          "{} The adapter's weights are only in {}, which is not in the format that torch.save writes since PyTorch "
          "1.6. Load it with "
          "PEFT and save it again (PeftModel.save_pretrained), which writes {}.",
          error.what(), kTorchFile, kWeightsFile);
  }
}

// The information that is needed to write the adapters of a model, or of some pipeline stages of it.
struct AdapterSummary {
  Json settings = nullptr;           // settings of all adapters for adapter_config.json; null: there are no adapters
  std::vector<std::string> adapted;  // paths of the adapted Linears
  std::set<std::string> others;      // last parts of the paths of the other Linears
  std::vector<SharedParameter> parameters;
};

std::string last_part(const std::string& path) { return path.substr(path.rfind('.') + 1); }

AdapterSummary summary_of(CausalLM& model) {
  AdapterSummary out;
  out.parameters = shared_parameters(model, ParameterSet::kOfAdapters);
  for (const auto& [path, module] : model.named_modules()) {
    if (const auto* linear = dynamic_cast<nn::LoraLinear*>(module)) {
      out.adapted.push_back(path);
      const auto& settings = linear->settings();
      out.settings = {{"lora_alpha", settings.alpha},
                      {"lora_dropout", settings.dropout ? settings.dropout->probability : 0.0},
                      {"r", settings.rank},
                      {"use_dora", settings.dora},
                      {"use_rslora", settings.rslora}};
    } else if (dynamic_cast<nn::Linear*>(module)) {
      out.others.insert(last_part(path));
    }
  }
  return out;
}

std::string to_text(const AdapterSummary& summary) {
  Json tensors = Json::array();
  for (const auto& each : summary.parameters) {
    tensors.push_back({{"name", each.names.front()},
                       {"shape", each.tensor.sizes().vec()},
                       {"dtype", static_cast<int>(each.tensor.scalar_type())}});
  }
  return Json{
      {"settings", summary.settings}, {"adapted", summary.adapted}, {"others", summary.others}, {"tensors", tensors}}
      .dump();
}

// All-gathers the AdapterSummary of each pipeline stage (`own` is that of this rank's stage) and merges these summaries
// in stage order. The tensors in AdapterSummary::parameters of the result are on the meta device. COLLECTIVE over the
// pipeline.
AdapterSummary summary_of_stages(comm::Group& pipeline, const AdapterSummary& own) {
  AdapterSummary out;
  std::set<std::string> seen;
  for (const auto& text : comm::all_gather_bytes(pipeline, to_text(own))) {
    const Json stage = parse_json_object(text, "[models.adapters] a stage");
    if (!stage.at("settings").is_null()) out.settings = stage.at("settings");
    for (const auto& path : stage.at("adapted")) out.adapted.push_back(path);
    for (const auto& name : stage.at("others")) out.others.insert(name.get<std::string>());
    for (const auto& each : stage.at("tensors")) {
      if (!seen.insert(each.at("name")).second) continue;
      const auto dtype = static_cast<c10::ScalarType>(each.at("dtype").get<int>());
      const auto shape = each.at("shape").get<std::vector<int64_t>>();
      out.parameters.push_back(
          {at::empty(shape, at::TensorOptions(dtype).device(at::kMeta)), {each.at("name").get<std::string>()}, {}});
    }
  }
  return out;
}

// Returns a list of target_modules that selects exactly the adapted Linears. The list has the last parts of their paths
// (such as "q_proj"), unless a Linear without adapter has one of these last parts. Then it has the whole paths.
std::vector<std::string> target_names(const AdapterSummary& summary) {
  std::set<std::string> names;
  for (const auto& path : summary.adapted) names.insert(last_part(path));
  for (const auto& name : names) {
    if (summary.others.contains(name)) return summary.adapted;
  }
  return {names.begin(), names.end()};
}

std::string config_text(const AdapterSummary& summary, const SaveAdaptersOptions& options) {
  const auto text_or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  Json config = {{"alpha_pattern", Json::object()},
                 {"base_model_name_or_path", text_or_null(options.base)},
                 {"bias", "none"},
                 {"fan_in_fan_out", false},
                 {"inference_mode", true},
                 {"init_lora_weights", true},
                 {"layers_pattern", nullptr},
                 {"layers_to_transform", nullptr},
                 {"modules_to_save", nullptr},
                 {"peft_type", "LORA"},
                 {"rank_pattern", Json::object()},
                 {"revision", text_or_null(options.revision)},
                 {"target_modules", target_names(summary)},
                 {"task_type", "CAUSAL_LM"}};
  config.update(summary.settings);
  return config.dump(2) + "\n";
}

void write_adapters(const AdapterSummary& summary, const std::vector<at::Tensor>& values,
                    const std::filesystem::path& folder, const SaveAdaptersOptions& options) {
  StagedFolder staged(folder);
  publish_file(staged.path() / kConfigFile, config_text(summary, options));
  std::vector<SafetensorsSpec> specs;
  for (const auto& parameter : summary.parameters) {
    specs.push_back(
        {peft_name(parameter.names.front()), parameter.tensor.scalar_type(), parameter.tensor.sizes().vec()});
  }
  SafetensorsWriter writer(staged.path() / kWeightsFile, specs);
  for (size_t i = 0; i < specs.size(); ++i) {
    check_finite(values[i], specs[i].name, "[models.adapters] " + folder.string());
    writer.write(specs[i].name, values[i]);
  }
  writer.finish();
  staged.publish();
}

// Returns the Linears of the whole model that this rank does not have, because they are in other pipeline stages.
std::set<std::string> linears_elsewhere(CausalLM& model) {
  std::set<std::string> names;
  const auto whole = make_model(model.config(), {.device = c10::Device(at::kMeta)});
  for (const auto& [path, module] : whole->named_modules()) {
    if (dynamic_cast<nn::Linear*>(module)) names.insert(path);
  }
  for (const auto& [path, module] : model.named_modules()) names.erase(path);
  return names;
}

// Returns PATH of "base_model.model.PATH.lora_A.weight", or an empty text for other names.
std::string adapted_path(const std::string& peft) {
  const size_t prefix = std::string(kPeftPrefix).size(), end = peft.find(".lora_");
  return !peft.starts_with(kPeftPrefix) || end == std::string::npos ? "" : peft.substr(prefix, end - prefix);
}

}  // namespace

AdapterConfig read_adapter_config(const std::filesystem::path& folder) {
  const auto path = folder / kConfigFile;
  const std::string where = "[models.adapters] " + path.string();
  const Json json = parse_json_object(read_file(path), where);
  const JsonReader top(json, where);
  const auto type = top.string("peft_type");
  TESSERA_CHECK(type == "LORA", ErrorKind::kConfig, "{}: peft_type: found {}, wanted LORA", where, quote(type));
  check_plain_lora(JsonReader(json, where, ErrorKind::kConfig));
  AdapterConfig config{.rank = top.integer("r", 8, 1, int64_t{1} << 20),
                       .alpha = top.number("lora_alpha", 8, 1e-9, kMostAlpha),
                       .dropout = top.number("lora_dropout", 0, 0, 0.999999),
                       .rslora = top.boolean("use_rslora", false),
                       .dora = top.boolean("use_dora", false)};
  read_targets(top, config);
  return config;
}

std::filesystem::path adapter_weights_file(const std::filesystem::path& folder) {
  for (const char* name : {kWeightsFile, kTorchFile}) {
    if (std::filesystem::exists(folder / name)) return folder / name;
  }
  raise(ErrorKind::kIo, "[models.adapters] {}: found neither {} nor {}. Name a folder that PEFT saved an adapter to.",
        folder.string(), kWeightsFile, kTorchFile);
}

void load_adapters(CausalLM& model, const std::filesystem::path& folder) {
  const at::NoGradGuard no_grad;
  const auto path = adapter_weights_file(folder);
  const auto file = open_adapter_weights(path);
  auto parameters = shared_parameters(model, ParameterSet::kOfAdapters);
  const auto elsewhere = linears_elsewhere(model);
  TESSERA_CHECK(!parameters.empty() || !elsewhere.empty(), ErrorKind::kConfig,
                "[models.adapters] {}: the model has no adapters to load into. Call add_adapters first.",
                path.string());
  // All problems are collected first, so that the model is unchanged when the error is thrown. The error is kShape only
  // when every problem is a wrong shape.
  std::vector<std::string> problems;
  bool only_shapes = true;
  std::set<std::string> known;
  for (const auto& parameter : parameters) {
    const auto name = peft_name(parameter.names.front());
    known.insert(name);
    if (!file->contains(name)) {
      problems.push_back(fmt::format("{} is missing", name));
      only_shapes = false;
    } else if (at::IntArrayRef(file->at(name).shape) != parameter.tensor.sizes()) {
      problems.push_back(fmt::format("{}: saved [{}], model wants [{}]", name, fmt::join(file->at(name).shape, ", "),
                                     fmt::join(parameter.tensor.sizes(), ", ")));
    } else if (!c10::isFloatingType(file->at(name).dtype)) {
      problems.push_back(
          fmt::format("{}: has dtype {}, wanted a floating-point dtype", name, c10::toString(file->at(name).dtype)));
      only_shapes = false;
    }
  }
  for (const auto& [name, stored] : file->tensors()) {
    if (known.contains(name) || elsewhere.contains(adapted_path(name))) continue;
    problems.push_back(fmt::format("{} is unexpected", quote(name)));
    only_shapes = false;
  }
  if (!problems.empty()) {
    raise(only_shapes ? ErrorKind::kShape : ErrorKind::kFormat,
          "[models.adapters] {}: {}{}. Its {} lists the Linears of the adapter.", path.string(), problems.front(),
          problems.size() > 1 ? fmt::format(" (and {} more)", problems.size() - 1) : "", kConfigFile);
  }
  for (auto& parameter : parameters) {
    const auto box = local_shard_box(parameter.tensor);
    const auto local = writable_local_shard(parameter, c10::Device(c10::DeviceType::CPU));
    if (local.numel() == 0) continue;
    const auto name = peft_name(parameter.names.front());
    file->read(name, box.offset, local);
    // If a converted value is not finite, read the stored values again: the error reports whether the file or the
    // conversion to the parameter's dtype is the cause.
    if (!find_non_finite(local)) continue;
    const auto stored = at::empty(local.sizes(), at::TensorOptions(file->at(name).dtype));
    file->read(name, box.offset, stored);
    check_converted(stored, local, name, "[models.adapters] " + path.string(), box.offset);
  }
  log_info("[models.adapters] {}: {} tensors read", path.string(), parameters.size());
}

void save_adapters(CausalLM& model, const std::filesystem::path& folder, const SaveAdaptersOptions& options) {
  const at::NoGradGuard no_grad;
  const auto own = summary_of(model);
  auto all = shared_parameters(model);
  all.insert(all.end(), own.parameters.begin(), own.parameters.end());
  const StageParameters stages(options.pipeline, all);
  const auto summary = stages.pipeline() ? summary_of_stages(*stages.pipeline(), own) : own;
  TESSERA_CHECK(!summary.parameters.empty(), ErrorKind::kConfig,
                "[models.adapters] {}: the model has no adapters to save", folder.string());
  std::map<std::string, at::Tensor> held;
  for (const auto& parameter : own.parameters) held[parameter.names.front()] = parameter.tensor;
  const auto value_of = [&](const SharedParameter& parameter) {
    const auto& tensor = held.at(parameter.names.front());
    return (is_dtensor(tensor) ? full_tensor(tensor.detach()) : tensor.detach()).contiguous();
  };
  // Every rank collects every parameter, because `collect` is COLLECTIVE; only the writing rank writes.
  std::vector<at::Tensor> values;
  for (const auto& parameter : summary.parameters) values.push_back(stages.collect(parameter, value_of));
  stages.attempt_on_all([&] {
    if (stages.is_writer()) write_adapters(summary, values, folder, options);
  });
}

}  // namespace tessera
