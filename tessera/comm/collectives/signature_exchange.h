// Comparing signatures over back-ends that do not do so by themselves, for comm.check: always. Internal to comm.
//
//   compare_signatures(group, signature);      // COLLECTIVE over the group, before the collective itself
//
// A message is compared by its receiver, which waits for what the sender announced: a send must not wait for its
// receive. Disagreement is thrown on all ranks that take part; Error kComm after the timeout. As thread-safe as the
// group.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/group/group.h"
#include "tessera/comm/group/signature.h"

namespace tessera::comm {

// COLLECTIVE over `group`, through its back-end for CPU tensors.
void compare_signatures(Group& group, const Signature& mine);

// What the sender of a message keeps until the message has arrived, which is later.
struct Announcement {
  at::Tensor bytes;
  c10::intrusive_ptr<c10d::Work> work;
};

// Between the two ranks of the message, through the group's back-end for CPU tensors (`backend`), apart from the
// messages themselves. Error kConfig for tags of 2^30 and more.
Announcement announce_message(Group& group, const Signature& mine);
void await_announced_message(c10d::Backend& backend, int rank, const Signature& mine);

}  // namespace tessera::comm
