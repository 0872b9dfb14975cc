#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/json.h"
#include "tessera/base/log.h"
#include "tessera/base/quote.h"
#include "tessera/base/staged.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/dtensor/tensor/local_part.h"
#include "tessera/formats/safetensors.h"
#include "tessera/formats/safetensors_writer.h"
#include "tessera/models/adapters.h"
#include "tessera/models/detail/local_part.h"

namespace tessera {
namespace {

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kWeightsFile = "adapter_model.safetensors";
constexpr const char* kPeftPrefix = "base_model.model.";
constexpr double kMostAlpha = 1e9;

// PEFT keeps DoRA's magnitudes under the name that they had as a parameter.
std::string peft_name(const std::string& own) {
  const std::string suffix = ".lora_magnitude_vector.weight";
  return kPeftPrefix + (own.ends_with(suffix) ? own.substr(0, own.size() - std::string(".weight").size()) : own);
}

bool is_neutral(const Json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) || (value.is_structured() && value.empty());
}

// What changes the result and is not done here.
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
  if (bias != "none") top.at("bias").fail("none: this version trains no biases beside adapters");
  const auto init = top.find("init_lora_weights");
  if (!init || init->value().is_boolean()) return;
  static const std::set<std::string> kKeepBase = {"gaussian", "eva", "orthogonal"};
  const auto how = init->as_string();
  if (!kKeepBase.contains(how))
    init->fail("true, false, gaussian, eva or orthogonal: others change the base's weights");
}

std::vector<std::string> targets_of(const JsonReader& top) {
  const auto found = top.find("target_modules");
  if (!found) raise(ErrorKind::kFormat, "{}: target_modules is missing", top.name());
  if (!found->is_array()) return {found->as_string()};
  std::vector<std::string> names;
  for (const auto& item : found->items()) names.push_back(item.as_string());
  return names;
}

// As few names as mean exactly the adapted Linears: their last parts where no other Linear is called so.
std::vector<std::string> target_names(CausalLM& model) {
  std::set<std::string> adapted, others;
  std::vector<std::string> paths;
  const auto last = [](const std::string& path) { return path.substr(path.rfind('.') + 1); };
  for (const auto& [path, module] : model.named_modules()) {
    if (dynamic_cast<nn::LoraLinear*>(module)) {
      paths.push_back(path);
      adapted.insert(last(path));
    } else if (dynamic_cast<nn::Linear*>(module)) {
      others.insert(last(path));
    }
  }
  for (const auto& name : adapted) {
    if (others.contains(name)) return paths;
  }
  return {adapted.begin(), adapted.end()};
}

std::string config_text(CausalLM& model, const std::string& base) {
  const auto& first = *adapted_linears(model).front().second;
  const auto& settings = first.settings();
  const Json config = {{"alpha_pattern", Json::object()},
                       {"base_model_name_or_path", base.empty() ? Json() : Json(base)},
                       {"bias", "none"},
                       {"fan_in_fan_out", false},
                       {"inference_mode", true},
                       {"init_lora_weights", true},
                       {"layers_pattern", nullptr},
                       {"layers_to_transform", nullptr},
                       {"lora_alpha", settings.alpha},
                       {"lora_dropout", settings.dropout ? settings.dropout->probability : 0.0},
                       {"modules_to_save", nullptr},
                       {"peft_type", "LORA"},
                       {"r", settings.rank},
                       {"rank_pattern", Json::object()},
                       {"revision", nullptr},
                       {"target_modules", target_names(model)},
                       {"task_type", "CAUSAL_LM"},
                       {"use_dora", settings.dora},
                       {"use_rslora", settings.rslora}};
  return config.dump(2) + "\n";
}

void write_adapters(CausalLM& model, const std::vector<detail::SharedParameter>& parameters,
                    const std::vector<at::Tensor>& values, const std::filesystem::path& folder,
                    const SaveAdaptersOptions& options) {
  StagedFolder staged(folder);
  publish_file(staged.path() / kConfigFile, config_text(model, options.base));
  std::vector<TensorSpec> specs;
  for (const auto& parameter : parameters) {
    specs.push_back(
        {peft_name(parameter.names.front()), parameter.tensor.scalar_type(), parameter.tensor.sizes().vec()});
  }
  SafetensorsWriter writer(staged.path() / kWeightsFile, specs);
  for (size_t i = 0; i < specs.size(); ++i) writer.write(specs[i].name, values[i]);
  writer.finish();
  staged.publish();
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
  return {.rank = top.integer("r", 8, 1, int64_t{1} << 20),
          .alpha = top.number("lora_alpha", 8, 1e-9, kMostAlpha),
          .dropout = top.number("lora_dropout", 0, 0, 0.999999),
          .rslora = top.boolean("use_rslora", false),
          .dora = top.boolean("use_dora", false),
          .target_modules = targets_of(top)};
}

void load_adapters(CausalLM& model, const std::filesystem::path& folder) {
  const at::NoGradGuard no_grad;
  const auto path = folder / kWeightsFile;
  const auto file = SafetensorsFile::open(path);
  auto parameters = detail::shared_parameters(model, detail::Parameters::kOfAdapters);
  TESSERA_CHECK(!parameters.empty(), ErrorKind::kConfig,
                "[models.adapters] {}: the model has no adapters to load into. Call add_adapters first.",
                path.string());
  std::vector<std::string> problems;
  bool only_shapes = true;
  std::set<std::string> known;
  for (const auto& parameter : parameters) {
    const auto name = peft_name(parameter.names.front());
    known.insert(name);
    if (!file->contains(name)) {
      problems.push_back(fmt::format("{} is missing", name));
      only_shapes = false;
    } else if (at::IntArrayRef(file->entry(name).shape) != parameter.tensor.sizes()) {
      problems.push_back(fmt::format("{}: saved [{}], model wants [{}]", name, fmt::join(file->entry(name).shape, ", "),
                                     fmt::join(parameter.tensor.sizes(), ", ")));
    } else if (!c10::isFloatingType(file->entry(name).dtype)) {
      problems.push_back(
          fmt::format("{}: is of {}, wanted floating numbers", name, c10::toString(file->entry(name).dtype)));
      only_shapes = false;
    }
  }
  for (const auto& [name, entry] : file->entries()) {
    if (known.contains(name)) continue;
    problems.push_back(fmt::format("{} is unexpected", quote(name)));
    only_shapes = false;
  }
  if (!problems.empty()) {
    raise(only_shapes ? ErrorKind::kShape : ErrorKind::kFormat,
          "[models.adapters] {}: {}{}. Its {} says which Linears it is for.", path.string(), problems.front(),
          problems.size() > 1 ? fmt::format(" (and {} more)", problems.size() - 1) : "", kConfigFile);
  }
  for (auto& parameter : parameters) {
    const auto box = detail::local_part_box(parameter.tensor);
    const auto local = detail::writable_part(parameter, c10::Device(c10::DeviceType::CPU));
    if (local.numel() == 0) continue;
    std::vector<IndexRange> ranges;
    for (size_t dim = 0; dim < box.shape.size(); ++dim) {
      ranges.push_back({box.offset[dim], box.offset[dim] + box.shape[dim]});
    }
    local.copy_(file->read_slice(peft_name(parameter.names.front()), ranges));
  }
  log_info("[models.adapters] {}: {} tensors read", path.string(), parameters.size());
}

void save_adapters(CausalLM& model, const std::filesystem::path& folder, const SaveAdaptersOptions& options) {
  const at::NoGradGuard no_grad;
  const auto parameters = detail::shared_parameters(model, detail::Parameters::kOfAdapters);
  TESSERA_CHECK(!parameters.empty(), ErrorKind::kConfig, "[models.adapters] {}: the model has no adapters to save",
                folder.string());
  std::vector<at::Tensor> values;
  for (const auto& parameter : parameters) {
    const auto& tensor = parameter.tensor;
    values.push_back((is_dtensor(tensor) ? full_tensor(tensor.detach()) : tensor.detach()).contiguous());
  }
  const auto mesh = detail::mesh_of(parameters);
  const auto write = [&] { write_adapters(model, parameters, values, folder, options); };
  if (!mesh) return write();
  std::vector<int64_t> dims(static_cast<size_t>(mesh->ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  comm::attempt_together(mesh->ndim() == 1 ? *mesh->group(0) : *mesh->group(dims), [&] {
    if (mesh->rank() == mesh->ranks().front()) write();
  });
}

}  // namespace tessera
