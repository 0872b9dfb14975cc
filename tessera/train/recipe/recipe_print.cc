#include "tessera/train/recipe/recipe_print.h"

#include <fmt/format.h>

#include "tessera/train/recipe/recipe_schema.h"
#include "tessera/train/recipe/recipe_value.h"

namespace tessera::train {
namespace {

// The default of a key as YAML; empty for a required key that has no default.
std::string default_of(const RecipeKey& key) {
  static const Recipe kDefaults;
  if (key.required && format_value(key, kDefaults).size() <= 2) return "";  // formatted as "" or []
  return format_value(key, kDefaults);
}

// Returns the accepted values of a key and its unit, such as "pretrained or random" or "integer >= 1, steps".
std::string accepted_in_words(const RecipeKey& key) {
  return accepted_values(key) + (*key.unit ? fmt::format(", {}", key.unit) : "");
}

const char* kDocsHead = R"(# The recipe

A recipe holds all settings of `tessera train RECIPE.yaml [section.key=value ...]`: one YAML file with the sections below.
Keys that are left out have their defaults. `tessera train RECIPE.yaml --print-config` prints the recipe with defaults and
overrides. `--check` checks the recipe together with model, data and world size, and does not train.

- Overrides on the command line replace what the file says; the last one wins: `train.steps=20 data.train=[a.txt,b.txt]`.
- An unknown key, a wrong type or a value out of range is an error (exit code 2) that names file, line and the accepted
  values. No setting is ignored silently.
- A setting that has no effect in the recipe (`optimizer.momentum` with AdamW) is named in a warning at the start of the run.
- `~` at the start of a path is the home folder.
- `-1` in `parallel` stands for all remaining ranks; the dims must multiply to the world size.
- Exactly one of `train.steps` and `train.epochs` has a value; an override of one takes the place of the other.
- `train.global_batch_size` is a multiple of data-parallel ranks x `train.local_batch_size`; gradients accumulate over the rest.
- Names that torchtitan, NeMo Automodel and NeMo RL use for the same setting are accepted, at the path that these programs
  use; the last column lists them. Only the names are accepted: values are those of this page, so that a value with another
  meaning there (a packed size of 0, -1 for the whole world) is an error that names the accepted values.
- A recipe is at most 1 MB large and 16 levels deep. Anchors and aliases may expand to 100,000 values; tags and repeated
  keys are errors.

This page is written by `tessera train --recipe-docs` from the tables in `tessera/train/recipe/` (`recipe_keys.cc`,
`recipe_training_keys.cc`).
)";

}  // namespace

Recipe with_model_as_named(Recipe recipe) {
  if (!recipe.model.name.empty()) recipe.model.path = recipe.model.name;
  return recipe;
}

// The values are printed by format_value(), and read_recipe() reads them back exactly. read_recipe() ignores the
// comments.
std::string to_yaml(const Recipe& recipe_with_paths) {
  const Recipe recipe = with_model_as_named(recipe_with_paths);
  std::string out;
  for (const auto& section : recipe_sections()) {
    out += fmt::format("{}{}:  # {}\n", out.empty() ? "" : "\n", section.name, section.help);
    for (const auto& key : recipe_keys()) {
      if (std::string_view(key.section) != section.name) continue;
      const std::string setting = fmt::format("  {}: {}", key.name, format_value(key, recipe));
      out += fmt::format("{:<40}  # {} ({})\n", setting, key.help, accepted_in_words(key));
    }
  }
  return out;
}

std::string recipe_help() {
  std::string out = "Keys of the recipe, in the file or as section.key=value:\n";
  for (const auto& section : recipe_sections()) {
    out += fmt::format("\n{}\n", section.help);
    for (const auto& key : recipe_keys()) {
      if (std::string_view(key.section) != section.name) continue;
      const std::string value = default_of(key);
      out += fmt::format("  {:<34} {}{}\n", key.path() + (value.empty() ? "" : "=" + value), key.help,
                         key.required && value.empty() ? " (required)" : "");
      out += fmt::format("  {:<34}   {}\n", "", accepted_in_words(key));
    }
  }
  return out + "\nNames of torchtitan and NeMo are accepted too: docs/recipe.md.\n";
}

std::string recipe_docs() {
  std::string out = kDocsHead;
  for (const auto& section : recipe_sections()) {
    out += fmt::format(
        "\n## {}\n{}.\n\n| key | default | what it does | accepted | also accepted as |\n|---|---|---|---|---|\n",
        section.name, section.help);
    for (const auto& key : recipe_keys()) {
      if (std::string_view(key.section) != section.name) continue;
      std::string aliases;
      for (const char* alias : key.aliases) aliases += fmt::format("{}`{}`", aliases.empty() ? "" : ", ", alias);
      const std::string value = default_of(key);
      out += fmt::format("| `{}` | {} | {} | {} | {} |\n", key.name, value.empty() ? "required" : "`" + value + "`",
                         key.help, accepted_in_words(key), aliases);
    }
  }
  return out;
}

}  // namespace tessera::train
