// Tests state dicts that are copied to the CPU, and copies into companion dicts, on one rank.
#include "tessera/state/cpu_state_dict.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "tessera/state/gather_state_dict.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CpuStateDict, CopiesLocalTensorsWithoutAliasing) {
  const auto weight = drawn({3, 2}, 1), turned = weight.t(), step = at::full({}, 7.0);
  const auto dict = get_cpu_state_dict(
      std::vector<std::pair<std::string, at::Tensor>>{{"w", weight}, {"t", turned}, {"step", step}, {"w", weight * 2}});
  EXPECT_THAT(keys_of(dict), ElementsAre("w", "t", "step"));
  EXPECT_TRUE(dict.at("w").tensor().equal(weight * 2));
  EXPECT_TRUE(dict.at("t").tensor().is_contiguous() && dict.at("t").tensor().equal(turned));
  step.fill_(8);
  EXPECT_EQ(dict.at("step").tensor().item<float>(), 7);
  // Without an accelerator, pinned memory gives one warning for all calls.
  static bool warned = false;
  ::testing::internal::CaptureStderr();
  for (int time = 0; time < 2; ++time) {
    const auto nested =
        get_cpu_state_dict(StateDict{{"s", StateDict{{"x", StateList{weight, 3}}}}}, /*pin_memory=*/true);
    EXPECT_TRUE(nested.at("s").dict().at("x").list()[0].tensor().equal(weight));
  }
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  size_t count = 0;
  for (size_t at = 0; (at = warnings.find("memory is not page-locked", at)) != warnings.npos; ++at) ++count;
  EXPECT_EQ(count, std::exchange(warned, true) ? 0U : 1U) << warnings;
  EXPECT_THAT(thrown_by([] {
                get_cpu_state_dict(StateDict{{"m", at::empty({2}, at::kMeta)}});
              }),
              HasSubstr("'m': on the meta device"));
}

TEST(CpuStateDict, ToCpuAndToLocalReturnPlainValuesUnchanged) {
  const auto weight = drawn({3}, 1);
  EXPECT_TRUE(to_cpu(weight).tensor().is_same(weight));
  EXPECT_TRUE(to_local_if_dtensor(weight).is_same(weight));
  EXPECT_EQ(to_cpu("text").string(), "text");
  EXPECT_TRUE(to_cpu(nullptr).is_none());
}

TEST(CopyStateDict, WritesIntoTheCompanionStateDict) {
  const StateDict source{{"w", drawn({4, 2}, 1)},
                         {"n", StateDict{{"s", at::full({}, 3.0)}, {"l", StateList{5, drawn({2}, 2)}}}},
                         {"e", at::zeros({0, 3})}};
  for (const bool shared : {false, true}) {
    const auto companion = create_cpu_state_dict(source, {.share_memory = shared});
    EXPECT_TRUE(check_state_dict_similarity(source, companion));
    EXPECT_EQ(companion.at("n").dict().at("s").tensor().item<float>(), 0);
    EXPECT_EQ(companion.at("n").dict().at("l").list()[0].integer(), 5);
    const auto copied = copy_state_dict(source, companion);
    EXPECT_TRUE(same_values(companion, source));
    EXPECT_TRUE(copied.at("w").tensor().is_same(companion.at("w").tensor()));
  }
  const auto companion = create_cpu_state_dict(source);
  auto other = source;
  other.set("w", drawn({2, 4}, 1));
  EXPECT_THAT(thrown_by([&] { copy_state_dict(other, companion); }), HasSubstr("CompanionMismatch at 'w'"));
  other.erase("w");
  EXPECT_THAT(thrown_by([&] { copy_state_dict(other, companion); }), HasSubstr("CompanionMismatch"));
  other.set("x", 1);
  EXPECT_THAT(thrown_by([&] { copy_state_dict(other, companion); }), HasSubstr("CompanionMismatch at 'x'"));
  EXPECT_THAT(thrown_by([&] { offload_state_dict_to_cpu({{"u", at::Tensor()}}); }), HasSubstr("Unexpected value type"));
  EXPECT_NO_THROW(offload_state_dict_to_cpu({{"u", at::Tensor()}}, {.type_check = false}));
}

}  // namespace
}  // namespace tessera::testing
