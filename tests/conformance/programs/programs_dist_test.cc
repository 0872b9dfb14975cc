// Tests programs of operations on DTensors against plain tensors. The programs of kept/ each once showed a defect; if
// the defect was fixed by a refusal, the file's first line says so. 3,000 more programs over the meshes are drawn with
// new seeds at every run; programs_slow_test.cc draws 200,000.
#include <gmock/gmock.h>

#include <memory>

#include "tests/conformance/programs/campaign.h"
#include "tests/conformance/programs/catalog.h"
#include "tests/conformance/programs/shrink.h"

namespace tessera::testing {
namespace {

TEST(KeptPrograms, EqualPlainTensors) {
  const auto kept = run_kept_programs();
  EXPECT_GE(kept.programs, 70);
  EXPECT_THAT(kept.wrong, ::testing::IsEmpty());
}

class DrawnPrograms : public ::testing::TestWithParam<std::vector<int64_t>> {};

TEST_P(DrawnPrograms, EqualPlainTensors) { EXPECT_TRUE(run_asked_programs(GetParam(), 375).wrong.empty()); }

INSTANTIATE_TEST_SUITE_P(, DrawnPrograms, ::testing::ValuesIn(program_meshes()),
                         [](const auto& info) { return mesh_name(info.param); });

// Tests the comparison itself: a wrong value, an error that plain tensors do not raise, and an error that is a refusal.
TEST(RanksSession, ReportsTheKindOfFailure) {
  RanksSession ranks({2});
  const auto trial_of = [](const std::string& steps) {
    return std::make_shared<Trial>(*make_trial(parse_program("mesh 2\nvalues 4\n" + steps)));
  };
  const std::string input = "%0 = input f64 [5] uniform -2 2 (S(0)) grad\n";
  EXPECT_EQ(ranks.run(trial_of(input + "%1 = exp(%0)\nbackward %1 (S(0))\ntwice\n")).kind, Verdict::Kind::kFine);

  auto wrong = trial_of(input + "%1 = exp(%0)\nbackward %1 (S(0))\ntwice\n");
  wrong->plain.values.tensors[1] = wrong->plain.values.tensors[1].detach() + 1e-7;
  EXPECT_EQ(ranks.run(wrong).label, "wrong value");
  auto gradient = trial_of(input + "%1 = exp(%0)\nbackward %1 (S(0))\ntwice\n");
  gradient->plain.gradients.first[0] = gradient->plain.gradients.first[0].detach() + 1e-7;
  EXPECT_EQ(ranks.run(gradient).label, "wrong value");
  auto second = trial_of(input + "%1 = exp(%0)\nbackward %1 (S(0))\ntwice\n");
  second->plain.gradients.second[0] = second->plain.gradients.second[0] + 1e-7;
  EXPECT_EQ(ranks.run(second).label, "wrong value");

  auto raises = trial_of(input + "%1 = exp(%0)\n");
  raises->program.steps[1].op = "matmul";
  raises->program.steps[1].args = {ref(0), num(int64_t{3})};
  EXPECT_EQ(ranks.run(raises).kind, Verdict::Kind::kWrong);

  const Verdict refused = ranks.run(trial_of("%0 = input f64 [5] uniform -2 2 (P(sum))\n%1 = relu_(%0)\n"));
  EXPECT_EQ(refused.kind, Verdict::Kind::kRefused);
  EXPECT_EQ(refused.refusal, Refusal::kInPlace);
  EXPECT_EQ(refused.step, 1);
}

}  // namespace
}  // namespace tessera::testing
