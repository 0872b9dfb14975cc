#include "tessera/train/recipe/recipe_print.h"

#include <fmt/format.h>

#include "tessera/train/recipe/recipe_schema.h"
#include "tessera/train/recipe/recipe_value.h"

namespace tessera::train {
namespace {

std::string default_of(const RecipeKey& key) {
  static const Recipe kDefaults;
  if (key.required && format_value(key, kDefaults).size() <= 2) return "";  // "" or []: none
  return format_value(key, kDefaults);
}

// "pretrained or random", "integer >= 1, steps".
std::string accepted_in_words(const RecipeKey& key) {
  return accepted_values(key) + (*key.unit ? fmt::format(", {}", key.unit) : "");
}

const char* kDocsHead = R"(# The recipe

`tessera train RECIPE.yaml [section.key=value ...]` is told everything by a recipe: one YAML file of the sections below.
Keys that are left out have their defaults. `tessera train RECIPE.yaml --print-config` prints the recipe as it will run,
`--check` checks it together with model, data and world and trains nothing.

- Overrides on the command line replace what the file says; the last one wins: `train.steps=20 data.train=[a.txt,b.txt]`.
- An unknown key, a wrong type or a value out of range is an error (exit code 2) that names file, line and what is wanted.
  So is a value that this version cannot do yet: nothing is ignored.
- A setting that has no effect beside the others (`optimizer.momentum` with AdamW) is told, in one line at the start.
- `~` at the start of a path is the home folder.
- `-1` in `parallel` means what is left of the world; the dims must multiply to its size.
- Exactly one of `train.steps` and `train.epochs` has a value; an override of one takes the place of the other.
- `train.global_batch_size` is a multiple of data-parallel ranks x `train.local_batch_size`; gradients accumulate over the rest.
- Names that torchtitan, NeMo Automodel and NeMo RL use for the same setting are accepted, at the place where they
  write them; the last column lists them. They are names only: the values are those of this page, so that a value that means
  something else there (a packed size of 0, a world's worth of -1) is an error that says what is wanted.
- A recipe is at most 1 MB and 16 levels deep; anchors and aliases work within a bound, tags and repeated keys are refused.

This page is written by `tessera train --recipe-docs` from the table in `tessera/train/recipe/recipe_keys.cc`.
)";

}  // namespace

Recipe with_model_as_named(Recipe recipe) {
  if (!recipe.model.name.empty()) recipe.model.path = recipe.model.name;
  return recipe;
}

std::string to_yaml(const Recipe& given) {
  const Recipe recipe = with_model_as_named(given);
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
