// What a recipe's model.path and model.weights name, as folders and files that are there.
//
//   auto recipe = read_recipe("recipes/demo.yaml", overrides);
//   resolve_model_source(recipe);
//
// No communication; thread-safe.
#pragma once

#include <filesystem>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

// Replaces model.path by its folder where it is a name in the Hub's cache or a GGUF file, which model.name keeps, and
// both by the checkpoint that LATEST names where they are the folder of a run or of its checkpoints. A run's checkpoint
// as model.path becomes model.weights, and model.path what that run started from. Error kConfig for weights that do not
// say of which model they are, kFormat for a damaged checkpoint, else as resolve_model_path's.
void resolve_model_source(Recipe& recipe);

// What a run started from as another run finds it from any folder, for its checkpoints: a name of the Hub, or an
// absolute path.
std::string base_to_keep(const Recipe& recipe);
// The model folder that the run of a checkpoint started from; empty where the checkpoint does not say (PyTorch's, and
// other weights), and where the model is gone. Error kFormat for a damaged one.
std::filesystem::path base_of(const std::filesystem::path& weights);

// What others call the model: its name on the Hub with a revision, where that is not main; else the path as the user
// wrote it.
struct PublicModelName {
  std::string name, revision;
};
PublicModelName public_model_name(const Recipe& recipe);

}  // namespace tessera::train
