#include "tessera/train/run/model_source.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/models/files/model_path.h"

namespace tessera::train {

namespace fs = std::filesystem;

namespace {

// Returns the base_model_reference() that a training run stored in its checkpoint `weights`. Returns an empty string if
// `weights` is anything else, such as a model folder, or has no such entry.
std::string recorded_base_model(const fs::path& weights) {
  if (!fs::is_directory(weights) || !DcpFolder::is_dcp_folder(weights)) return {};
  const auto checkpoint = Checkpoint::open(weights);
  return JsonReader(checkpoint.extra(), "[train.model] " + (weights / "manifest.json").string()).string("base", "");
}

bool is_gguf(const fs::path& path) { return path.extension() == ".gguf"; }

}  // namespace

std::string base_model_reference(const Recipe& recipe) {
  const auto& name = recipe.model.name;
  if (!name.empty() && !is_gguf(name)) return name;
  return fs::absolute(name.empty() ? recipe.model.path : name).lexically_normal().string();
}

fs::path base_model_folder(const fs::path& weights) {
  const auto base = recorded_base_model(weights);
  if (base.empty()) return {};
  try {
    return resolve_model_path(base, "the checkpoint's base");
  } catch (const Error&) {  // the path does not exist, or the name is not in the Hub's cache
    return {};
  }
}

PublicModelName public_model_name(const Recipe& recipe) {
  const auto& name = recipe.model.name;
  if (name.empty()) return {recipe.model.path, ""};
  const size_t at = name.find('@');
  if (is_gguf(name) || at == name.npos) return {name, ""};
  const auto revision = name.substr(at + 1);
  return {name.substr(0, at), revision == "main" ? "" : revision};
}

void resolve_model_source(Recipe& recipe) {
  // 1. If model.weights is a run's folder, it is replaced by the newest checkpoint of the run.
  // 2. If model.path is a Hub name or a GGUF file, it is replaced by a folder. A GGUF file also holds the weights.
  // 3. If the folder model.path has weights but no config.json, it is a checkpoint of a run. Then model.weights
  //    becomes this checkpoint, and model.path becomes the base model that the checkpoint records.
  auto &path = recipe.model.path, &weights = recipe.model.weights;
  if (!weights.empty()) weights = CheckpointFolder::resolve_latest(weights).string();
  const auto resolve = [&](const std::string& name_or_path) {
    path = resolve_model_path(name_or_path, "model.path");
    recipe.model.name = path == name_or_path ? "" : name_or_path;
  };
  const auto named_path = path;
  resolve(named_path);
  if (is_gguf(named_path) && path != named_path && weights.empty()) weights = named_path;
  if (fs::exists(fs::path(path) / "config.json")) return;
  const auto found = CheckpointFolder::resolve_latest(path);
  if (!TensorFiles::has_tensors(found)) return;  // the reader of config.json will report the missing file
  TESSERA_CHECK(weights.empty(), ErrorKind::kConfig,
                "[train.model] model.path: {} holds only weights, and model.weights names {}. Name a folder with "
                "config.json as model.path.",
                found.string(), weights);
  const auto base = recorded_base_model(found);
  const auto hint = fmt::format(
      "Name the folder of the model's config.json and tokenizer as model.path, and model.weights={}.", found.string());
  TESSERA_CHECK(!base.empty(), ErrorKind::kConfig,
                "[train.model] model.path: {} holds only weights, and does not name their model. {}", found.string(),
                hint);
  resolve(base);
  TESSERA_CHECK(fs::exists(fs::path(path) / "config.json"), ErrorKind::kConfig,
                "[train.model] model.path: {} is of a run that started from {}, where there is no model now. {}",
                found.string(), quote(base), hint);
  weights = found.string();
  log_info("[train.model] weights from {}, config.json and tokenizer from {}", weights, path);
}

}  // namespace tessera::train
