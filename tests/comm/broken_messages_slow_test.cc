// A rank waits again, after the error, for a message that can no longer end. The process must end in time.
#include "tests/comm/broken_messages.h"

namespace tessera::comm {
namespace {

using namespace broken_messages;

void fail_and_wait(Group& group, std::vector<PendingCollective> under_way) {
  try {
    fail(group);
  } catch (const PeerFailed&) {
    under_way[0].wait();
  }
}

TEST(BrokenMessages, WaitForPendingSendAfterTheErrorThrows) {
  expect_prompt_end({.name = "wait", .posts = post_receive, .under_way = send_big, .fails = fail_and_wait});
}

// The collective's send blocks a thread of Gloo, which nothing wakes. The monitor therefore ends the process.
TEST(BrokenMessages, RankBlockedInAnAbortedCollectiveIsTerminated) {
  const auto begin = [](Group& group) { return one_of(broadcast(group, big(), 0)); };
  expect_prompt_end({.name = "collective", .posts = begin, .under_way = begin, .fails = fail_and_wait},
                    "A collective that was aborted does not end");
}

}  // namespace
}  // namespace tessera::comm
