// The table of recipe keys. Parsing, validation, --print-config, --help and docs/recipe.md are all made from this
// table.
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

struct ValueRange {
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();
  bool above_minimum = false;  // the minimum itself is out of range
  bool below_maximum = false;  // the maximum itself is out of range
  bool without_zero = false;   // 0 is out of range
};

// The YAML mappings that a field of type std::vector<std::string> accepts, in addition to a text and a list of texts.
enum class AcceptedMappings {
  kNone,
  kPairs,    // one mapping; each of its entries becomes the text "KEY=VALUE"
  kSources,  // items may be mappings, each a data source (data_sources.h)
};

struct RecipeKey {
  const char* section = "";  // set by recipe_keys()
  const char* name;
  FieldRef (*field)(Recipe&);  // pointer to the field: its type is the key's type, its value in Recipe{} the default
  const char* help;
  const char* unit = "";  // for numbers
  ValueRange range = {};  // for numbers
  size_t count = 0;       // for a list of numbers: its length; 0: any length
  AcceptedMappings mappings = AcceptedMappings::kNone;
  bool required = false;                  // the key must be set and not be empty
  std::vector<const char*> allowed = {};  // for text: the accepted words; empty: any text
  // Paths of the same setting in configuration files of torchtitan and NeMo (Automodel, RL), with dots, from the root.
  std::vector<const char*> aliases = {};

  std::string path() const { return std::string(section) + "." + name; }
};

struct RecipeSectionInfo {
  const char* name;
  const char* help;
  std::vector<RecipeKey> (*make_keys)();
};

std::span<const RecipeKey> recipe_keys();              // ordered by section
std::span<const RecipeSectionInfo> recipe_sections();  // in the same order
// The key with this path ("train.steps") or alias; null if there is none.
const RecipeKey* find_recipe_key(std::string_view path);

// The accepted values in words: "integer >= 1", "stop or skip", "list of 2 numbers in [0, 1)".
std::string accepted_values(const RecipeKey& key);

}  // namespace tessera::train
