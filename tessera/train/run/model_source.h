// Resolves model.path and model.weights of a recipe to existing folders and files.
//
//   auto recipe = read_recipe("recipes/demo.yaml", overrides);
//   resolve_model_source(recipe);
//
// No communication; thread-safe.
#pragma once

#include <filesystem>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// Resolves the keys model.path and model.weights of the recipe in place:
// - model.path that is a name in the Hub's cache or a GGUF file becomes its folder; the given name is kept in
//   model.name. The GGUF file also becomes model.weights if model.weights is empty.
// - A folder of a run, or of its checkpoints, becomes the checkpoint that LATEST names.
// - model.path that is a checkpoint of a run becomes model.weights, and model.path becomes the model that this
//   run started from.
// Error kConfig for weights that do not record their model; kFormat for a damaged checkpoint; else errors as
// resolve_model_path().
void resolve_model_source(Recipe& recipe);

// The model that a run starts from, in a form that is valid in every working directory: a name of the Hub, or an
// absolute path. It is stored in the run's checkpoints.
std::string base_model_reference(const Recipe& recipe);
// The folder of the model that the run of a checkpoint started from. Empty if `weights` does not record it (PyTorch's
// checkpoints and other files), or the model no longer exists. Error kFormat for a damaged checkpoint.
std::filesystem::path base_model_folder(const std::filesystem::path& weights);

// The name of the model for other programs: its name on the Hub, with the revision if it is not main; else the path as
// the user wrote it.
struct PublicModelName {
  std::string name, revision;
};
PublicModelName public_model_name(const Recipe& recipe);

}  // namespace tessera::train
