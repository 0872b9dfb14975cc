// Tests of the notes about a resumed run: settings that changed since the checkpoint, with both values.
#include "tessera/train/run/resume_notes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/train/recipe/recipe_print.h"

namespace tessera::train {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Recipe resumed_recipe(const std::vector<std::string>& overrides) {
  return parse_recipe("model: {path: m}\ndata: {train: d}\ntrain: {steps: 40}\n", "r.yaml", overrides);
}

TEST(ResumeNotes, NameEverySettingThatChangedWithBothValues) {
  const auto saved = to_yaml(resumed_recipe({}));
  EXPECT_THAT(changed_settings(saved, resumed_recipe({})), IsEmpty());
  EXPECT_THAT(changed_settings(saved, resumed_recipe({"checkpoint.dir=elsewhere", "checkpoint.resume=elsewhere"})),
              IsEmpty());
  EXPECT_THAT(
      changed_settings(saved,
                       resumed_recipe({"train.steps=60", "optimizer.lr=0.001", "schedule.name=linear",
                                       "schedule.warmup_steps=3", "train.global_batch_size=16", "parallel.tp=2"})),
      ElementsAre("parallel.tp 2 (was 1)", "optimizer.lr 0.001 (was 0.0001)", "schedule.name linear (was cosine)",
                  "schedule.warmup_steps 3 (was 10)", "train.steps 60 (was 40)", "train.global_batch_size 16 (was 8)"));
  EXPECT_THAT(changed_settings(saved, resumed_recipe({"train.epochs=2"})),
              ElementsAre("train.steps null (was 40)", "train.epochs 2 (was null)"));
  EXPECT_THAT(resume_notes(saved, resumed_recipe({"train.steps=60"}), 40, 60),
              ElementsAre("[train.resume] settings changed since: train.steps 60 (was 40)"));
}

TEST(ResumeNotes, RunWithAllStepsDoneIsReported) {
  const auto saved = to_yaml(resumed_recipe({}));
  EXPECT_THAT(resume_notes(saved, resumed_recipe({}), 20, 40), IsEmpty());
  EXPECT_THAT(
      resume_notes(saved, resumed_recipe({}), 40, 40),
      ElementsAre("[train.resume] nothing is left to train: 40 steps are done, and train.steps 40 asks for no more."));
  EXPECT_THAT(resume_notes(saved, resumed_recipe({"train.epochs=2"}), 40, 40),
              ElementsAre(::testing::_,
                          "[train.resume] nothing is left to train: 40 steps are done, and train.epochs 2 "
                          "asks for no more."));
}

TEST(ResumeNotes, ARecipeOfAnotherVersionIsNotCompared) {
  EXPECT_THAT(changed_settings("model: {path: m, mystery: 3}\n", resumed_recipe({})), IsEmpty());
  EXPECT_THAT(changed_settings("", resumed_recipe({})), IsEmpty());
}

// A later run with the same recipe has the same name, also if the cache is in another place.
TEST(ResumeNotes, ModelIsComparedByItsGivenName) {
  auto recipe = resumed_recipe({"model.path=acme/tiny"});
  const auto saved = to_yaml(recipe);
  recipe.model.name = recipe.model.path;
  recipe.model.path = "/cache/models--acme--tiny/snapshots/0123";
  EXPECT_EQ(to_yaml(recipe), saved);
  EXPECT_THAT(changed_settings(saved, recipe), IsEmpty());
}

}  // namespace
}  // namespace tessera::train
