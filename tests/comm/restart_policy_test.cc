// RestartPolicy: the launcher's decision whether a failed attempt is started again.
#include "tessera/comm/launch/restart_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RankFailure own(const std::string& cause, int rank = 1) {
  return {.text = "rank " + std::to_string(rank) + " of 4: " + cause, .cause = cause, .exit_code = 1};
}

RankFailure killed() {
  return {
      .text = "rank 1 of 4: ended by signal 9", .cause = "ended by signal 9", .exit_code = 137, .from_outside = true};
}

TEST(RestartPolicy, ReportsNothingWithoutRestarts) {
  RestartPolicy policy({}, "");
  const auto decision = policy.decide(killed(), {});
  EXPECT_FALSE(decision.restarts);
  EXPECT_EQ(decision.text, "");
}

TEST(RestartPolicy, LimitsRestartsWithoutProgress) {
  RestartPolicy policy({.max_restarts = 2, .has_marks = true, .reports_steps = true}, "step-1");
  EXPECT_TRUE(policy.decide(killed(), {.step = 3, .mark = "step-1"}).restarts);
  const auto second = policy.decide(killed(), {.step = 4, .mark = "step-1"});  // unsaved steps are no progress
  EXPECT_TRUE(second.restarts);
  EXPECT_EQ(second.tries, 2);
  const auto third = policy.decide(killed(), {.step = 5, .mark = "step-1"});
  EXPECT_FALSE(third.restarts);
  EXPECT_THAT(third.text, HasSubstr("2 restarts without progress"));
}

TEST(RestartPolicy, ProgressResetsTheRestartCount) {
  RestartPolicy policy({.max_restarts = 1, .has_marks = true, .reports_steps = true}, "");
  for (int i = 0; i < 50; ++i) {
    const auto decision = policy.decide(killed(), {.step = i, .mark = "step-" + std::to_string(i)});
    EXPECT_TRUE(decision.restarts);
    EXPECT_EQ(decision.attempt, i + 1);
    EXPECT_EQ(decision.tries, 1);
  }
}

TEST(RestartPolicy, UnreadableMarkIsNoProgress) {
  RestartPolicy policy({.max_restarts = 2, .has_marks = true, .reports_steps = true}, "step-1");
  EXPECT_TRUE(policy.decide(killed(), {.step = 3, .mark = "step-1"}).restarts);
  EXPECT_EQ(policy.decide(killed(), {.step = 4, .mark = std::nullopt}).tries, 2);
  EXPECT_FALSE(policy.decide(killed(), {.step = 5, .mark = "step-1"}).restarts) << "it is what it was";
}

TEST(RestartPolicy, WithoutMarksANewStepIsProgress) {
  RestartPolicy policy({.max_restarts = 1}, "");
  EXPECT_TRUE(policy.decide(killed(), {.step = 5}).restarts);
  EXPECT_TRUE(policy.decide(killed(), {.step = 6}).restarts);
  EXPECT_FALSE(policy.decide(killed(), {.step = 6}).restarts);
}

TEST(RestartPolicy, SameFailureTwiceAtOneStepEndsTheRunAndNamesBoth) {
  RestartPolicy policy({.max_restarts = 9, .has_marks = true, .reports_steps = true}, "");
  EXPECT_TRUE(policy.decide(own("[train] loss of step 8 is nan", 3), {.step = 7}).restarts);
  const auto decision = policy.decide(own("[train] loss of step 8 is nan", 0), {.step = 7});
  EXPECT_FALSE(decision.restarts);
  EXPECT_THAT(decision.text, AllOf(HasSubstr("the same failure twice after step 7"),
                                   HasSubstr("First: rank 3 of 4: [train] loss of step 8 is nan"),
                                   HasSubstr("Then: rank 0 of 4: [train] loss of step 8 is nan")));
}

TEST(RestartPolicy, FailuresThatDifferOnlyInNumbersAreTheSame) {
  RestartPolicy policy({.max_restarts = 9, .reports_steps = true}, "");
  EXPECT_TRUE(policy.decide(own("out of memory: wanted 512 MiB"), {.step = 7}).restarts);
  EXPECT_FALSE(policy.decide(own("out of memory: wanted 640 MiB"), {.step = 7}).restarts);
}

TEST(RestartPolicy, DifferentFailuresOrStepsAreRetried) {
  RestartPolicy policy({.max_restarts = 9, .reports_steps = true}, "");
  EXPECT_TRUE(policy.decide(own("a"), {.step = 7}).restarts);
  EXPECT_TRUE(policy.decide(own("b"), {.step = 7}).restarts);
  EXPECT_TRUE(policy.decide(own("b"), {.step = 8}).restarts);
  EXPECT_TRUE(policy.decide(killed(), {.step = 8}).restarts);
  EXPECT_TRUE(policy.decide(killed(), {.step = 8}).restarts);  // a kill is not a defect of the program
}

TEST(RestartPolicy, SameFailureTwiceBeforeTheFirstStepEndsTheRun) {
  RestartPolicy tells({.max_restarts = 9, .reports_steps = true}, "");
  EXPECT_TRUE(tells.decide(own("no such file"), {}).restarts);
  EXPECT_THAT(tells.decide(own("no such file"), {}).text, HasSubstr("the same failure twice before its first step"));
  RestartPolicy any({.max_restarts = 9}, "");  // without reported steps no two failures are at a known step
  EXPECT_TRUE(any.decide(own("exit code 1"), {}).restarts);
  EXPECT_TRUE(any.decide(own("exit code 1"), {}).restarts);
}

}  // namespace
}  // namespace tessera::comm
