// Tests of the outlier detector for losses and gradient norms: z-scores against a window of earlier values.
#include "tessera/train/output/outliers.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera::train {
namespace {

TEST(Outliers, NoScoreBeforeTheMinimumCount) {
  OutlierDetector detector(8, 4);
  for (const double value : {1.0, 2.0, 3.0, 4.0}) EXPECT_TRUE(std::isnan(detector.add(value)));
  EXPECT_FALSE(std::isnan(detector.add(5)));
}

TEST(Outliers, ZScoreIsAgainstTheWindowBeforeTheValue) {
  OutlierDetector detector(4, 4);
  for (const double value : {100.0, 1.0, 3.0, 1.0, 3.0}) detector.add(value);  // 100 has left the window
  EXPECT_DOUBLE_EQ(detector.add(7), 5);                                        // mean 2, deviation 1
  // Window 3, 1, 3, 7: mean 3.5, variance (0.25 + 6.25 + 0.25 + 12.25) / 4 = 4.75
  EXPECT_DOUBLE_EQ(detector.add(3.5 + std::sqrt(4.75)), 1);
}

TEST(Outliers, SmallChangesOfALargeValueAreDetected) {
  OutlierDetector detector(128, 16);
  for (int i = 0; i < 100000; ++i) detector.add(1e8 + (i % 2 ? 1e-3 : -1e-3));
  EXPECT_NEAR(detector.add(1e8 + 1e-2), 10, 0.5);
}

TEST(Outliers, NonFiniteValuesAreOutliersAndNotInTheWindow) {
  OutlierDetector detector(4, 2);
  detector.add(1);
  detector.add(3);
  EXPECT_TRUE(std::isinf(detector.add(NAN)));
  EXPECT_LT(detector.add(-INFINITY), 0);
  EXPECT_DOUBLE_EQ(detector.add(4), 2);
}

TEST(Outliers, ConstantWindow) {
  OutlierDetector detector(4, 2);
  detector.add(2);
  detector.add(2);
  EXPECT_EQ(detector.add(2), 0);
  EXPECT_TRUE(std::isinf(detector.add(2.5)));
}

}  // namespace
}  // namespace tessera::train
