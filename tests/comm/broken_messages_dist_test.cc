// A rank is killed during messages over Gloo: the other rank must end in time. broken_messages.h has the cases' code.
#include "tests/comm/broken_messages.h"

namespace tessera::comm {
namespace {

using namespace broken_messages;

TEST(BrokenMessages, PendingSendDestroyedInACatchBlockDoesNotBlock) {
  expect_prompt_end({.name = "dropped",
                     .posts = post_receive,
                     .under_way = send_big,
                     .fails = [](Group& group, std::vector<PendingCollective> sent) {
                       try {
                         fail(group);
                       } catch (const PeerFailed&) {
                         sent.clear();
                         throw;
                       }
                     }});
}

TEST(BrokenMessages, ManyPendingSendsAreAbandonedDuringStackUnwinding) {
  expect_prompt_end({.name = "many",
                     .posts = [](Group&) { return std::vector<PendingCollective>(); },
                     .under_way =
                         [](Group& group) {
                           std::vector<PendingCollective> sent;
                           for (int i = 0; i < 60; ++i) sent.push_back(send(group, at::zeros({1}), 1, kOtherTag + i));
                           return sent;
                         },
                     .fails = [](Group& group, const std::vector<PendingCollective>&) { fail(group); }});
}

}  // namespace
}  // namespace tessera::comm
