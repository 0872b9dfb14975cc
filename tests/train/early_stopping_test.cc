// Tests of early stopping: patience, the least improvement, saved state and losses that are not finite.
#include "tessera/train/run/early_stopping.h"

#include <gmock/gmock.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

TEST(EarlyStopping, StopsAfterPatienceValidationsWithoutImprovement) {
  EarlyStopping stopping({.patience = 2, .min_delta = 0.1});
  int64_t step = 0;
  for (const double loss : {3.0, 2.8, 2.75, 2.5, 2.45}) {
    stopping.add_validation(++step, loss);
    EXPECT_FALSE(stopping.is_over()) << loss;
  }
  stopping.add_validation(6, 2.41);  // better than the best loss, but by less than 0.1
  EXPECT_TRUE(stopping.is_over());
  EXPECT_THAT(stopping.reason(), HasSubstr("has not fallen below 2.5000 (after step 4) by more than 0.1 in 2"));
}

TEST(EarlyStopping, NeverStopsWithoutPatienceAndRestoresItsState) {
  EarlyStopping off({}), on({.patience = 2});
  for (int step = 0; step < 5; ++step) off.add_validation(step, 1);
  EXPECT_FALSE(off.is_over());
  on.load_state(off.state());
  EXPECT_TRUE(on.is_over());
  EarlyStopping again({.patience = 5});
  again.load_state(off.state());
  EXPECT_FALSE(again.is_over());
  again.add_validation(6, 1);
  EXPECT_TRUE(again.is_over());
  for (const char* text : {"3", "{}", R"({"best": "low", "best_step": 1, "without_better": 1})"}) {
    EXPECT_THROW(again.load_state(nlohmann::json::parse(text)), Error) << text;
  }
}

TEST(EarlyStopping, NonFiniteLossesAreNoImprovement) {
  EarlyStopping stopping({.patience = 2});
  stopping.add_validation(1, std::numeric_limits<double>::quiet_NaN());
  stopping.add_validation(2, 5);
  EXPECT_FALSE(stopping.is_over());
  stopping.add_validation(3, std::numeric_limits<double>::infinity());
  stopping.add_validation(4, std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(stopping.is_over());
}

}  // namespace
}  // namespace tessera::train
