#include "tessera/comm/collectives/signature_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

Signature signature_of(const uint8_t* bytes) {
  Signature result;
  std::memcpy(&result, bytes, sizeof result);
  return result;
}

std::vector<Signature> gather(Group& group, const Signature& mine) {
  at::Tensor own = at::from_blob(const_cast<Signature*>(&mine), {sizeof mine}, at::kByte);
  at::Tensor all = at::empty({group.size() * static_cast<int64_t>(sizeof mine)}, at::kByte);
  TESSERA_CHECK(group.backend()._allgather_base(all, own)->wait(), ErrorKind::kComm, "aborted");
  std::vector<Signature> result;
  for (int rank = 0; rank < group.size(); ++rank) {
    result.push_back(signature_of(all.const_data_ptr<uint8_t>() + static_cast<size_t>(rank) * sizeof mine));
  }
  return result;
}

// The tag under which the announcement of a message with `tag` is sent: 2^30 + tag, so announcements and messages
// cannot be confused.
int announcement_tag(int tag) {
  constexpr int kFirst = 1 << 30;
  TESSERA_CHECK(tag >= 0 && tag < kFirst, ErrorKind::kConfig,
                "under comm.check: always the tag of a message is from 0 to {}, found {}", kFirst - 1, tag);
  return kFirst + tag;
}

}  // namespace

// Every rank compares the signatures of all ranks, so either all ranks throw or none does.
void compare_signatures(Group& group, const Signature& mine) {
  const auto all = gather(group, mine);
  std::vector<RankSignature> calls;
  bool agree = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    calls.emplace_back(rank, all[static_cast<size_t>(rank)]);
    agree = agree && calls.back().second.hash == mine.hash;
  }
  if (!agree) raise_disagreement(group.name(), calls);
}

SignatureMessage announce_message(Group& group, const Signature& mine) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof mine)}, at::kByte);
  std::memcpy(bytes.data_ptr(), &mine, sizeof mine);
  std::vector<at::Tensor> tensors = {bytes};
  return {bytes, group.backend().send(tensors, mine.root, announcement_tag(mine.tag))};
}

// Receives the sender's signature of a message (announce_message()) and compares it with `mine`. Messages of one tag
// are matched by order, and so are their announcements. So the n-th announcement of a tag belongs to the n-th message
// of this tag, and signatures with different hashes mean that sender and receiver disagree on what this message is.
void await_announced_message(c10d::Backend& backend, int rank, const Signature& mine) {
  std::vector<at::Tensor> tensors = {at::empty({static_cast<int64_t>(sizeof mine)}, at::kByte)};
  const auto work = backend.recv(tensors, mine.root, announcement_tag(mine.tag));
  TESSERA_CHECK(work->wait(), ErrorKind::kComm, "aborted");
  const Signature theirs = signature_of(tensors[0].const_data_ptr<uint8_t>());
  if (theirs.hash != mine.hash) raise_disagreement(mine.group, {{mine.root, theirs}, {rank, mine}});
}

}  // namespace tessera::comm
