// Tests of the notes about a recipe: settings without effect, a long warm-up, and large steps.
#include "tessera/train/run/recipe_notes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/optim/schedule.h"
#include "tessera/train/recipe/recipe_schedule.h"
#include "tessera/train/run/run_setup.h"

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Recipe parsed_recipe(const std::string& more) {
  return parse_recipe("model: {path: m}\ndata: {train: d}\n" + more, "r.yaml");
}

TEST(RecipeNotes, SettingsWithoutEffectAreReportedInOneLine) {
  EXPECT_THAT(recipe_notes(parsed_recipe(""), 100, 100), IsEmpty());
  EXPECT_THAT(recipe_notes(parsed_recipe("optimizer: {momentum: 0.9, ns_steps: 5}\nschedule: {name: constant, "
                                         "min_lr_ratio: 0.5}\ncheckpoint: {keep_best: 3}"),
                           100, 100),
              ElementsAre("[train.recipe] without effect: optimizer.momentum 0.9 (with optimizer.name adamw), "
                          "schedule.min_lr_ratio 0.5 (with schedule.name constant), checkpoint.keep_best 3 (with no "
                          "validation)"));
  EXPECT_THAT(recipe_notes(parsed_recipe("optimizer: {name: sgd, betas: [0.8, 0.9], eps: 1.0e-6}"), 100, 100),
              ElementsAre("[train.recipe] without effect: optimizer.betas [0.8, 0.9] (with optimizer.name sgd), "
                          "optimizer.eps 1.0e-06 (with optimizer.name sgd)"));
  EXPECT_THAT(recipe_notes(parsed_recipe("optimizer: {name: muon, momentum: 0.9}"), 100, 100), IsEmpty());
  auto recipe = parsed_recipe("lora: {path: a, rank: 8, alpha: 4}");
  EXPECT_THAT(recipe_notes(recipe, 100, 100),
              ElementsAre("[train.recipe] without effect: model.lora.rank 8 (with model.lora.path, whose folder has "
                          "its own), model.lora.alpha 4.0 (with model.lora.path, whose folder has its own)"));
  recipe = parsed_recipe("");
  recipe.model.init = "random";
  recipe.model.weights = recipe.model.name = "m.gguf";  // a GGUF file is resolved to these values
  EXPECT_THAT(recipe_notes(recipe, 100, 100), IsEmpty());
  recipe.model.weights = "w";
  EXPECT_THAT(recipe_notes(recipe, 100, 100),
              ElementsAre("[train.recipe] without effect: model.weights w (with model.init random)"));
}

// With train.epochs the number of steps is known only after the data is loaded.
TEST(RecipeNotes, WarmUpLongerThanTheRunIsCutAndReported) {
  const auto recipe = parsed_recipe("train: {epochs: 1, global_batch_size: 4}\nschedule: {name: linear}");
  EXPECT_THAT(recipe_notes(recipe, 10, 3),
              ElementsAre("[train.schedule] schedule.warmup_steps: 10 in a run of 3 steps: the warm-up is cut to 3."));
  EXPECT_DOUBLE_EQ(build_schedule(recipe, 3).at(2), recipe.optimizer.lr);
  EXPECT_THAT(recipe_notes(recipe, 40, 10), IsEmpty());
  const auto falls = parsed_recipe("train: {epochs: 1}\nschedule: {name: wsd, decay_steps: 4}");
  EXPECT_THAT(recipe_notes(falls, 100, 12),
              ElementsAre("[train.schedule] schedule.warmup_steps: 10 in a run of 12 steps: the warm-up is cut to 8."));
  EXPECT_DOUBLE_EQ(build_schedule(falls, 12).at(7), falls.optimizer.lr);
}

TEST(RecipeNotes, StepWithMoreRowsThanTheDataIsReported) {
  EXPECT_THAT(recipe_notes(parsed_recipe(""), 3, 100),
              ElementsAre("[train.data] data.train: 3 rows, but a step takes 8 (train.global_batch_size): a step has "
                          "some rows more than once."));
  EXPECT_THAT(recipe_notes(parsed_recipe("train: {epochs: 20}"), 3, 100), IsEmpty()) << "the last step is short";
}

TEST(StepsForRows, RoundsUp) {
  const auto recipe = parsed_recipe("train: {epochs: 3, global_batch_size: 4}");
  EXPECT_EQ(steps_for_rows(recipe, 0), 0);
  EXPECT_EQ(steps_for_rows(recipe, 8), 2);
  EXPECT_EQ(steps_for_rows(recipe, 10), 3);
}

}  // namespace
}  // namespace tessera::train
