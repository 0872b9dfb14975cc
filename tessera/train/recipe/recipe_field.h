// What the tables of recipe keys are written with. Internal to recipe_keys.cc and recipe_training_keys.cc.
//
//   template <auto Member>
//   constexpr auto kModel = &field_of<&Recipe::model, Member>;
//   RecipeKey key{.name = "path", .field = kModel<&ModelSection::path>, .help = "..."};
#pragma once

#include "tessera/train/recipe/recipe_schema.h"

namespace tessera::train {

template <auto Section, auto Member>
FieldRef field_of(Recipe& recipe) {
  return &((recipe.*Section).*Member);
}

inline constexpr Range kFromZero{.minimum = 0, .maximum = 1e15};
inline constexpr Range kFromOne{.minimum = 1, .maximum = 1e15};
inline const std::vector<const char*> kDtypes{"float32", "bfloat16"};

// Of the sections optimizer to comm: recipe_training_keys.cc.
std::vector<RecipeKey> make_optimizer_keys();
std::vector<RecipeKey> make_schedule_keys();
std::vector<RecipeKey> make_train_keys();
std::vector<RecipeKey> make_precision_keys();
std::vector<RecipeKey> make_checkpoint_keys();
std::vector<RecipeKey> make_log_keys();
std::vector<RecipeKey> make_comm_keys();

}  // namespace tessera::train
