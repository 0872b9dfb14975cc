// Helpers to write the tables of recipe keys. Internal to recipe_keys.cc and recipe_training_keys.cc.
//
//   RecipeKey key{.name = "path", .field = field_of<&ModelSection::path>, .help = "..."};
#pragma once

#include <tuple>

#include "tessera/train/recipe/recipe_schema.h"

namespace tessera::train {

template <class Section, class Value>
FieldRef member_of_section(Recipe& recipe, Value Section::*member) {
  const auto sections =
      std::tie(recipe.model, recipe.lora, recipe.data, recipe.parallel, recipe.optimizer, recipe.schedule, recipe.train,
               recipe.precision, recipe.checkpoint, recipe.log, recipe.comm);
  return &(std::get<Section&>(sections).*member);
}
template <auto Member>
FieldRef field_of(Recipe& recipe) {
  return member_of_section(recipe, Member);
}

inline constexpr ValueRange kFromZero{.minimum = 0, .maximum = 1e15};
inline constexpr ValueRange kFromOne{.minimum = 1, .maximum = 1e15};
inline const std::vector<const char*> kDtypes{"float32", "bfloat16"};

// The keys of each section from optimizer to comm; defined in recipe_training_keys.cc.
std::vector<RecipeKey> make_optimizer_keys();
std::vector<RecipeKey> make_schedule_keys();
std::vector<RecipeKey> make_train_keys();
std::vector<RecipeKey> make_precision_keys();
std::vector<RecipeKey> make_checkpoint_keys();
std::vector<RecipeKey> make_log_keys();
std::vector<RecipeKey> make_comm_keys();

}  // namespace tessera::train
