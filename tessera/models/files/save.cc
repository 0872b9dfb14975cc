#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/formats/companions.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/formats/safetensors/safetensors_writer.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/config/family.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/tensors/model_parameters.h"
#include "tessera/models/tensors/stacked_tensors.h"
#include "tessera/models/tensors/stage_parameters.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera {
namespace {

bool holds_weights(const std::filesystem::path& dir) {
  return std::filesystem::exists(dir / "model.safetensors") ||
         std::filesystem::exists(dir / "model.safetensors.index.json");
}

// Opens the folder from which the model was loaded, if the model's family has tensors there that the model object does
// not own (WeightMap::unowned_prefixes). These tensors are then copied from that folder.
std::optional<SafetensorsFolder> open_unowned_tensors(const WeightMap& map, const std::filesystem::path& source_dir) {
  if (map.unowned_prefixes.empty()) return std::nullopt;
  if (!source_dir.empty() && holds_weights(source_dir)) return SafetensorsFolder::open(source_dir);
  log_warning("[models.save] '{}' holds no weights, so tensors that the model does not own ({}...) are not saved",
              source_dir.string(), map.unowned_prefixes.front());
  return std::nullopt;
}

// Writes the model folder. Only the rank that writes has such an object; the folder appears at publish().
class ModelFolderWriter {
 public:
  ModelFolderWriter(const CausalLM& model, const std::vector<SharedParameter>& parameters,
                    const std::filesystem::path& dir, const std::filesystem::path& source_dir,
                    const SaveOptions& options)
      : map_(family_of(model.config().architecture).weights),
        unowned_(open_unowned_tensors(map_, source_dir)),
        folder_(dir),
        weights_(folder_.path(), specs(parameters, options), {.max_shard_bytes = options.max_shard_bytes}) {
    const auto dtype = options.dtype.value_or(parameters.front().tensor.scalar_type());
    publish_file(folder_.path() / "config.json", model.config().to_json(dtype));
    if (!source_dir.empty()) copy_companions(source_dir, folder_.path());
  }
  void write(const SharedParameter& parameter, const at::Tensor& value) {
    const auto stacked = stacked_of(parameter);
    if (stacked.empty()) weights_.write(saved_name(parameter), value);
    for (const auto& each : stacked) weights_.write(each.name, value[each.expert].narrow(0, each.first_row, each.rows));
  }
  void publish() {
    for (const auto& name : unowned_names()) weights_.write(name, unowned_->tensor(name));
    weights_.finish();
    folder_.publish();
  }

 private:
  // Returns the name that the parameter has in unowned_, the folder from which the model was loaded (see
  // open_unowned_tensors()). If that folder was not opened or lacks the parameter, returns the first of the parameter's
  // names in files (file_names()).
  std::string saved_name(const SharedParameter& parameter) const {
    const auto names = file_names(map_, parameter);
    for (const auto& name : names) {
      if (unowned_ && unowned_->contains(name)) return name;
    }
    return names.front();
  }
  std::vector<StackedTensor> stacked_of(const SharedParameter& parameter) const {
    return stacked_tensors(map_, saved_name(parameter), parameter.tensor.sizes());
  }
  std::vector<std::string> unowned_names() const {
    std::vector<std::string> names;
    if (!unowned_) return names;
    for (const auto& [name, file] : unowned_->files()) {
      if (map_.is_unowned(name)) names.push_back(name);
    }
    return names;
  }
  std::vector<SafetensorsSpec> specs(const std::vector<SharedParameter>& parameters, const SaveOptions& options) const {
    std::vector<SafetensorsSpec> out;
    for (const auto& parameter : parameters) {
      const auto dtype = options.dtype.value_or(parameter.tensor.scalar_type());
      const auto stacked = stacked_of(parameter);
      if (stacked.empty()) out.push_back({saved_name(parameter), dtype, parameter.tensor.sizes().vec()});
      for (const auto& each : stacked) out.push_back({each.name, dtype, {each.rows, parameter.tensor.size(2)}});
    }
    for (const auto& name : unowned_names()) {
      const auto& entry = unowned_->entry(name);
      out.push_back({name, entry.dtype, entry.shape});
    }
    return out;
  }
  const WeightMap& map_;
  std::optional<SafetensorsFolder> unowned_;
  StagedFolder folder_;
  SafetensorsFolderWriter weights_;
};

// Returns a function that returns the unsharded value of a parameter, which it finds by any of the parameter's names.
// With `merge_adapters` the parameter's adapter is merged. The function is COLLECTIVE over the parameter's mesh.
std::function<at::Tensor(const SharedParameter&)> make_value_getter(CausalLM& model,
                                                                    const std::vector<SharedParameter>& own,
                                                                    const SaveOptions& options) {
  std::map<std::string, nn::LoraLinear*> adapted;
  for (const auto& [path, linear] : options.merge_adapters ? adapted_linears(model) : AdaptedLinears{}) {
    adapted[path + ".weight"] = linear;
  }
  std::map<std::string, nn::PackedWeight*> packed;
  for (const auto& [name, weight] : nn::packed_weights(model)) packed[name] = weight;
  std::map<std::string, at::Tensor> tensors;
  for (const auto& parameter : own) {
    for (const auto& name : parameter.names) tensors[name] = parameter.tensor;
  }
  return [adapted, packed, tensors](const SharedParameter& parameter) {
    at::Tensor whole;
    if (const auto found = packed.find(parameter.names.front()); found != packed.end()) {
      TESSERA_CHECK(found->second->weight.defined(), ErrorKind::kInternal,
                    "[models.save] {}: has no values yet. Load or initialise first.", found->first);
      whole = found->second->weight.values();
    } else {
      const auto held =
          std::ranges::find_if(parameter.names, [&](const std::string& name) { return tensors.contains(name); });
      const auto& tensor = tensors.at(*held);
      whole = is_dtensor(tensor) ? full_tensor(tensor) : tensor;
    }
    const auto adapter = adapted.find(parameter.names.front());
    // The weight and its adapter are added in float32, so that the sum is rounded only once, to the saved dtype.
    return adapter == adapted.end() ? whole : merged_weight(*adapter->second, whole.to(at::kFloat));
  };
}

}  // namespace

void save_pretrained(CausalLM& model, const std::filesystem::path& dir, const std::filesystem::path& source_dir,
                     const SaveOptions& options) {
  at::NoGradGuard no_grad;
  const auto own = parameters_and_packed(model);
  const StageParameters stages(options.pipeline, own);
  const nn::ParameterOptions as_saved{options.dtype.value_or(own.front().tensor.scalar_type()), at::kMeta};
  const auto whole_model = stages.pipeline() ? make_model(model.config(), as_saved) : nullptr;
  const auto parameters = whole_model ? shared_parameters(*whole_model) : own;
  const bool writes = stages.is_writer();
  const auto value_of = make_value_getter(model, own, options);
  // After an error, the writing rank continues the loop below, because the other ranks wait for it in the collectives
  // of collect(). attempt_on_all() at the end throws the error on every rank.
  std::optional<Error> error;  // first error of the writing rank
  const auto attempt = [&](const auto& step) {
    if (error) return;
    try {
      step();
    } catch (const std::exception& failed) {
      error = as_error(failed);
    }
  };
  std::optional<ModelFolderWriter> folder;
  if (writes) attempt([&] { folder.emplace(model, parameters, dir, source_dir, options); });
  for (const auto& parameter : parameters) {
    // collect() is COLLECTIVE, so the writing rank calls it also after an error.
    const auto whole = stages.collect(parameter, value_of);
    if (!writes) continue;
    attempt([&] {
      TESSERA_CHECK(!whole.is_meta(), ErrorKind::kInternal,
                    "[models.save] {}: has no values yet. Load or initialise first.", parameter.names.front());
      const auto dtype = options.dtype.value_or(parameter.tensor.scalar_type());
      const auto saved = whole.detach().to(dtype).contiguous();
      check_converted(whole, saved, parameter.names.front(), "[models.save] " + dir.string());
      folder->write(parameter, saved);
    });
  }
  if (writes) attempt([&] { folder->publish(); });
  folder.reset();
  stages.attempt_on_all([&] {
    if (error) throw *error;
  });
}

}  // namespace tessera
