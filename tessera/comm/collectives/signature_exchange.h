// Comparing signatures over back-ends that do not do so by themselves, for comm.check: always. Internal to comm.
//
//   compare_signatures(group, signature);      // COLLECTIVE over the group, before the collective itself
//
// A message is compared by its receiver, which waits for what the sender announced: a send must not wait for its
// receive. Disagreement is thrown on all ranks that take part; Error kComm after the timeout. As thread-safe as the
// group.
#pragma once

#include "tessera/comm/group/group.h"
#include "tessera/comm/group/signature.h"

namespace tessera::comm {

// COLLECTIVE over `group`, through its back-end for CPU tensors.
void compare_signatures(Group& group, const Signature& mine);
void announce_message(Group& group, const Signature& mine);
void await_announced_message(c10d::Store& store, int rank, const Signature& mine);

}  // namespace tessera::comm
