// A sample of the conformance suite on the pretend device: every operation of the groups that models live on, once or
// twice on a mesh of 2, against the plain operation on the CPU.
#include <fmt/format.h>

#include "tests/conformance/suite.h"
#include "tests/devices/pretend.h"

namespace tessera::testing {
namespace {

class OnPretendMesh : public ::testing::TestWithParam<const char*> {};

TEST_P(OnPretendMesh, OperationsEqualThePlainOnesOfTheCpu) {
  rc::Random random(20261123);
  Conformance run({.mesh = {2}, .device = "pretend"});
  add_group(GetParam(), {5},
            [&](const std::shared_ptr<const Reference>& reference) { run.add_random(reference, 1, random); });
  run.check();
  EXPECT_GT(run.report().cases, 5);
  for (const auto& [name, errors] : run.report().failures) ADD_FAILURE() << name << ": " << errors.front();
  EXPECT_THAT(pretend::take_faults(), ::testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, OnPretendMesh,
                         ::testing::Values("view", "matmul", "reduction", "tensor", "loss", "norm_layer", "attention",
                                           "pointwise", "foreach"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tessera::testing
