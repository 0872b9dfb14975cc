// Tests how nested state dicts are flattened and unflattened, and how two dicts are compared.
#include "tessera/state/state_dict_structure.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/state/drawn_values.h"
#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(FlattenStateDict, JoinsThePathsOfLeavesInOrder) {
  const auto weight = at::ones({2});
  const auto flat = flatten_state_dict({{"b", StateDict{{"x", weight}, {int64_t{3}, 1}}},
                                        {"a", StateList{2.5, StateTuple{{"t", nullptr}}}},
                                        {"none", StateDict{}}});
  EXPECT_THAT(keys_of(flat.values), ElementsAre("b.x", "b.3", "a.0", "a.1.0", "a.1.1", "none"));
  EXPECT_TRUE(flat.values.at("b.x").tensor().is_same(weight));
  EXPECT_EQ(flat.mapping.at("a.1.0").size(), 3u);
}

TEST(FlattenStateDict, RoundTripsAnyDict) {
  EXPECT_TRUE(rc::check([] {
    const auto dict = drawn_dict(3);
    // A number and a text that look alike give one key. Such dicts are discarded.
    FlatStateDict flat;
    try {
      flat = flatten_state_dict(dict);
    } catch (const Error&) {
      RC_DISCARD("duplicate keys");
    }
    RC_ASSERT(same_values(unflatten_state_dict(flat), dict));
    RC_ASSERT(check_state_dict_similarity(unflatten_state_dict(flat), dict));
  }));
}

TEST(FlattenStateDict, RefusesTwoValuesOfOneKeyAndContradictoryPaths) {
  EXPECT_THAT(thrown_by([] {
                flatten_state_dict({{"a.b", 1}, {"a", StateDict{{"b", 2}}}});
              }),
              HasSubstr("duplicated flatten key 'a.b'"));
  auto flat = flatten_state_dict({{"a", StateList{1, 2}}});
  for (const int64_t position : {int64_t{-1}, int64_t{1} << 40}) {
    flat.mapping["a.1"] = {{PathStep::Into::kDict, "a"}, {PathStep::Into::kList, position}};
    EXPECT_THAT(thrown_by([&] { unflatten_state_dict(flat); }),
                HasSubstr("'a.1': found position " + std::to_string(position) + " of a list, wanted 0..16777215"));
  }
  flat.mapping["a.0"] = {{PathStep::Into::kDict, "a"}, {PathStep::Into::kDict, "x"}};
  EXPECT_THAT(thrown_by([&] { unflatten_state_dict(flat); }), HasSubstr("contradicts"));
  flat.mapping["a.1"] = {{PathStep::Into::kDict, "a"}};
  EXPECT_THAT(thrown_by([&] { unflatten_state_dict(flat); }), HasSubstr("'a.1'"));
  flat.mapping.erase("a.0");
  EXPECT_THAT(thrown_by([&] { unflatten_state_dict(flat); }), HasSubstr("no path"));
}

TEST(CheckStateDictSimilarity, ComparesStructureDtypeAndSize) {
  const StateDict one{{"w", at::zeros({2, 3})}, {"l", StateList{1, "x"}}};
  EXPECT_TRUE(check_state_dict_similarity(one, {{"l", StateList{7, "y"}}, {"w", at::ones({2, 3})}}));
  EXPECT_FALSE(check_state_dict_similarity(one, {{"w", at::zeros({3, 2})}, {"l", StateList{1, "x"}}}));
  EXPECT_FALSE(check_state_dict_similarity(one, {{"w", at::zeros({2, 3}, at::kDouble)}, {"l", StateList{1, "x"}}}));
  EXPECT_FALSE(check_state_dict_similarity(one, {{"w", at::zeros({2, 3})}, {"l", StateList{1}}}));
  EXPECT_FALSE(check_state_dict_similarity(one, {{"w", at::zeros({2, 3})}, {"m", StateList{1, "x"}}}));
  EXPECT_FALSE(check_state_dict_similarity(one, {{"w", 3}, {"l", StateList{1, "x"}}}));
  EXPECT_FALSE(check_state_dict_similarity(one, {{"w", at::zeros({2, 3})}, {"l", StateTuple{{1, "x"}}}}));
}

TEST(SameValues, ComparesAsPythonDoes) {
  EXPECT_TRUE(same_values(1, 1.0));
  EXPECT_FALSE(same_values(true, 1));
  EXPECT_FALSE(same_values("a", StateBytes{"a"}));
  EXPECT_FALSE(same_values(at::ones({2}), at::zeros({2})));
  EXPECT_FALSE(same_values(at::ones({2}), at::ones({2}, at::kDouble)));
  EXPECT_FALSE(same_values(StateDict{{"a", 1}}, StateDict{{int64_t{0}, 1}}));
}

}  // namespace
}  // namespace tessera::testing
