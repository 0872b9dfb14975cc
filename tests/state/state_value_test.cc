// Tests the error messages of StateValue for wrong keys and types.
#include "tessera/state/state_value.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/state/values.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

TEST(StateValue, ErrorsNameWrongKeysAndTypes) {
  const StateDict dict{{"lr", 0.5}, {int64_t{3}, StateList{1}}};
  EXPECT_THAT(thrown_by([&] { dict.at("betas"); }), HasSubstr("no key 'betas' among the 2 of this dict"));
  EXPECT_THAT(thrown_by([&] { dict.at(int64_t{4}); }), HasSubstr("no key '4'"));
  EXPECT_THAT(thrown_by([&] { dict.at("lr").list(); }), HasSubstr("found a value of type float, expected list"));
  EXPECT_THAT(thrown_by([&] { dict.at(int64_t{3}).tensor(); }), HasSubstr("found a value of type list, expected"));
}

}  // namespace
}  // namespace tessera::testing
