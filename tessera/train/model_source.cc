#include "tessera/train/model_source.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/base/log.h"
#include "tessera/base/quote.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/formats/tensor_files.h"
#include "tessera/models/model_path.h"

namespace tessera::train {

namespace fs = std::filesystem;

fs::path base_of(const fs::path& weights) {
  if (!fs::is_directory(weights) || !DcpFolder::is_one(weights)) return {};
  const auto checkpoint = Checkpoint::open(weights);
  return JsonReader(checkpoint.extra(), "[train.model] " + (weights / "manifest.json").string()).string("base", "");
}

void resolve_model_source(Recipe& recipe) {
  auto &path = recipe.model.path, &weights = recipe.model.weights;
  if (!weights.empty()) weights = CheckpointFolder::find(weights).string();
  const auto given = std::exchange(path, resolve_model_path(path, "model.path"));
  if (fs::path(given).extension() == ".gguf" && path != given && weights.empty()) weights = given;
  if (fs::exists(fs::path(path) / "config.json")) return;
  const auto found = CheckpointFolder::find(path);
  if (!TensorFiles::is_there(found)) return;  // whoever reads config.json says what is wrong
  TESSERA_CHECK(weights.empty(), ErrorKind::kConfig,
                "[train.model] model.path: {} holds weights alone, and model.weights names {}. Name a folder with "
                "config.json as model.path.",
                found.string(), weights);
  const auto base = base_of(found);
  const auto hint = fmt::format(
      "Name the folder of the model's config.json and tokenizer as model.path, and model.weights={}.", found.string());
  TESSERA_CHECK(!base.empty(), ErrorKind::kConfig,
                "[train.model] model.path: {} holds weights alone, and does not say of which model. {}", found.string(),
                hint);
  TESSERA_CHECK(fs::exists(base / "config.json"), ErrorKind::kConfig,
                "[train.model] model.path: {} is of a run that started from {}, where no model is now. {}",
                found.string(), quote(base.string()), hint);
  path = base.string();
  weights = found.string();
  log_info("[train.model] the weights of {}, whose model is that of {}", weights, path);
}

}  // namespace tessera::train
