// Tests a sample of the conformance suite on the pretend device: every operation of the groups that models use most,
// once or twice on a mesh of 2, against the plain operation on the CPU. The ranks are threads; for one group they are
// processes.
#include <fmt/format.h>

#include "tests/conformance/suite.h"
#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

struct Sampled {
  const char* group;
  RankMode mode = RankMode::kThreads;
};

class OnPretendMesh : public ::testing::TestWithParam<Sampled> {};

TEST_P(OnPretendMesh, OperationsEqualPlainTensorsOnTheCpu) {
  rc::Random random(20261123);
  Conformance run({.mesh = {2}, .device = "pretend", .mode = GetParam().mode});
  add_group(GetParam().group, {5},
            [&](const std::shared_ptr<const Reference>& reference) { run.add_random(reference, 1, random); });
  if (!run.check()) return;
  EXPECT_GT(run.report().cases, 5);
  for (const auto& [name, errors] : run.report().failures) ADD_FAILURE() << name << ": " << errors.front();
  EXPECT_THAT(pretend::take_faults(), ::testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, OnPretendMesh,
                         ::testing::Values(Sampled{"view"}, Sampled{"matmul"}, Sampled{"reduction"}, Sampled{"tensor"},
                                           Sampled{"loss"}, Sampled{"norm_layer"}, Sampled{"attention"},
                                           Sampled{"pointwise"}, Sampled{"foreach"},
                                           Sampled{"matmul", RankMode::kProcesses}),
                         [](const auto& info) {
                           return info.param.group +
                                  std::string(info.param.mode == RankMode::kThreads ? "" : "Processes");
                         });

}  // namespace
}  // namespace tessera::testing
