// Functions that throw one common error on all ranks: attempt_together() and the comparison of named values.
#include <gmock/gmock.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/agreement.h"
#include "tests/support/ranks.h"

namespace tessera::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Returns kind and message of the Error that `action` must throw on this rank.
std::pair<ErrorKind, std::string> error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
  ADD_FAILURE() << "no error on this rank";
  return {ErrorKind::kInternal, ""};
}

TESSERA_RANKS_TEST(AttemptTogether, ErrorOfOneRankIsThrownOnAllRanks, (1, 3)) {
  Group& group = *world->group();
  int done = 0;
  attempt_together(group, [&] { ++done; });
  EXPECT_EQ(done, 1);
  const int last = world->size() - 1;
  const auto [kind, text] = error_of([&] {
    attempt_together(group, [&] {
      if (world->rank() == last) raise(ErrorKind::kFormat, "file of rank {} is damaged\nsecond line", last);
    });
  });
  EXPECT_EQ(kind, ErrorKind::kFormat);
  EXPECT_THAT(text, HasSubstr(fmt::format("file of rank {} is damaged", last)));
  if (world->size() > 1) {
    EXPECT_THAT(text, ::testing::StartsWith(fmt::format("rank {}: ", last)));
  }
  const auto [other, of_std] = error_of([&] {
    attempt_together(group, [&] {
      if (world->rank() == 0) raise(ErrorKind::kMemory, "first");
      throw std::runtime_error("second");
    });
  });
  EXPECT_EQ(other, ErrorKind::kMemory) << of_std;
  attempt_together(group, [] {});  // the group is still usable
}

TESSERA_RANKS_TEST(CheckSame, ErrorNamesDifferentValuesAndTheirRanks, (3)) {
  Group& group = *world->group();
  const bool odd = world->rank() == 2;
  check_same(group, {{"seed", "1"}, {"data", "abc"}}, "");
  const auto [kind, text] = error_of([&] {
    check_same(group, {{"seed", "1"}, {"data", odd ? "abd" : "abc"}}, "Use the same files.");
  });
  EXPECT_EQ(kind, ErrorKind::kConfig);
  EXPECT_THAT(text, AllOf(HasSubstr("data: abc on rank 0, abd on rank 2"), HasSubstr("Use the same files."),
                          ::testing::Not(HasSubstr("seed"))));
  const auto [more, long_text] = error_of([&] {
    NamedValues facts;
    for (int i = 0; i < 5; ++i) facts.emplace_back(fmt::format("fact {}", i), odd ? "x" : "y");
    check_same(group, facts, "");
  });
  EXPECT_EQ(more, ErrorKind::kConfig);
  EXPECT_THAT(long_text, AllOf(HasSubstr("fact 2: y on rank 0, x on rank 2"), HasSubstr("and 2 more")));
  const auto facts_of = [&](const NamedValues& first, const NamedValues& others) {
    return error_of([&] { check_same(group, odd ? others : first, ""); }).second;
  };
  EXPECT_THAT(facts_of({}, {{"seed", "1"}}), HasSubstr("seed: nothing on rank 0, 1 on rank 2"));
  EXPECT_THAT(facts_of({{"seed", "1"}}, {{"seed", "1"}, {"lr", "2"}}), HasSubstr("lr: nothing on rank 0, 2 on rank 2"));
  EXPECT_THAT(facts_of({{"seed", "1"}}, {{"lr", "1"}}), HasSubstr("seed: 1 on rank 0, lr 1 on rank 2"));
}

}  // namespace
}  // namespace tessera::comm
