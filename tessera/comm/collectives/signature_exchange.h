// Compares the signatures of a call before data moves, for back-ends that do not compare by themselves (Gloo, NCCL).
// Used under comm.check: always. Internal to comm.
//
//   compare_signatures(group, signature);      // COLLECTIVE over the group, before the collective itself
//
// For a message the sender announces its signature, and the receiver waits for the announcement and compares: a send
// must not wait for its receive. Disagreement is thrown on all ranks of a collective, and on the receiver of a message.
// Error kComm after the timeout. As thread-safe as the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "tessera/comm/group/group.h"
#include "tessera/comm/group/signature.h"

namespace tessera::comm {

// Throws Disagreement when the signatures of the ranks differ. COLLECTIVE over `group`, through its back-end for CPU
// tensors.
void compare_signatures(Group& group, const Signature& mine);

// A signature that is being sent to the receiver of a message. The sender keeps it until the message has been sent.
struct SignatureMessage {
  at::Tensor bytes;
  c10::intrusive_ptr<c10d::Work> work;
};

// The sender calls announce_message(), the receiver await_announced_message(), which blocks. Announcements go through
// the group's back-end for CPU tensors (`backend`) under tags of their own, 2^30 + tag. Error kConfig for negative tags
// and for tags of 2^30 and more.
SignatureMessage announce_message(Group& group, const Signature& mine);
void await_announced_message(c10d::Backend& backend, int rank, const Signature& mine);

}  // namespace tessera::comm
