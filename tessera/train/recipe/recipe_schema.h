// The one table of recipe keys. Parsing, validation, --print-config, --help and docs/recipe.md come from it.
//
//   for (const RecipeKey& key : recipe_keys()) fmt::print("{}.{}: {}\n", key.section, key.name, key.help);
//
// A new key is a field in recipe.h (type and default) and one row in recipe_keys.cc or recipe_training_keys.cc.
// Thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/train/recipe/recipe.h"

namespace tessera::train {

using FieldRef = std::variant<int64_t*, std::optional<int64_t>*, double*, bool*, std::string*,
                              std::vector<std::string>*, std::vector<double>*>;

struct Range {
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();
  bool above_minimum = false;  // minimum itself is outside
  bool below_maximum = false;  // maximum itself is outside
  bool without_zero = false;
};

// What a list of texts may be given as, beside a text and a list of them.
enum class Mappings {
  kNone,
  kPairs,    // one mapping: "KEY=VALUE" for each of its entries
  kSources,  // mappings as items: data_sources.h
};

struct RecipeKey {
  const char* section = "";  // set by recipe_keys()
  const char* name;
  FieldRef (*field)(Recipe&);  // gives the type, and on a default Recipe the default
  const char* help;
  const char* unit = "";  // of numbers
  Range range = {};       // of numbers
  size_t count = 0;       // of a list of numbers, 0: any
  Mappings mappings = Mappings::kNone;
  bool required = false;                  // must be given and not be empty
  std::vector<const char*> allowed = {};  // of words; empty: any text
  // The same setting in torchtitan's and NeMo's (Automodel's, RL's) configuration files, dotted from the root.
  std::vector<const char*> aliases = {};

  std::string path() const { return std::string(section) + "." + name; }
};

struct RecipeSectionInfo {
  const char* name;
  const char* help;
  std::vector<RecipeKey> (*make_keys)();
};

std::span<const RecipeKey> recipe_keys();              // section by section
std::span<const RecipeSectionInfo> recipe_sections();  // in the order of keys
// By path or alias; null when there is none.
const RecipeKey* find_recipe_key(std::string_view path);

// The type and what is accepted, in words: "integer >= 1", "stop or skip", "list of 2 numbers in [0, 1)".
std::string accepted_values(const RecipeKey& key);

}  // namespace tessera::train
