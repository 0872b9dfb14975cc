#include "tessera/comm/collectives/signature_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

std::vector<uint8_t> bytes_of(const Signature& signature) {
  const auto* begin = reinterpret_cast<const uint8_t*>(&signature);
  return {begin, begin + sizeof signature};
}

Signature signature_of(const uint8_t* bytes) {
  Signature result;
  std::memcpy(&result, bytes, sizeof result);
  return result;
}

std::vector<Signature> gather(Group& group, const Signature& mine) {
  at::Tensor own = at::from_blob(const_cast<Signature*>(&mine), {sizeof mine}, at::kByte);
  at::Tensor all = at::empty({group.size() * static_cast<int64_t>(sizeof mine)}, at::kByte);
  TESSERA_CHECK(group.backend()._allgather_base(all, own)->wait(), ErrorKind::kComm, "broken off");
  std::vector<Signature> result;
  for (int rank = 0; rank < group.size(); ++rank) {
    result.push_back(signature_of(all.const_data_ptr<uint8_t>() + static_cast<size_t>(rank) * sizeof mine));
  }
  return result;
}

Signature read_signature(c10d::Store& store, const std::string& key) {
  const auto bytes = store.get(key);
  TESSERA_CHECK(bytes.size() == sizeof(Signature), ErrorKind::kComm,
                "{} holds {} bytes, wanted {}. Do all ranks run the same build?", key, bytes.size(), sizeof(Signature));
  return signature_of(bytes.data());
}

// What identifies a message is the same at both ends.
std::string message_key(const Signature& message, int from, int to) {
  return fmt::format("message/{}/{}/{}/{}", from, to, message.tag, message.sequence);
}

}  // namespace

void compare_signatures(Group& group, const Signature& mine) {
  const auto all = gather(group, mine);
  std::vector<SignedBy> calls;
  bool agree = true;
  for (int rank = 0; rank < group.size(); ++rank) {
    calls.emplace_back(rank, all[static_cast<size_t>(rank)]);
    agree = agree && calls.back().second.hash == mine.hash;
  }
  if (!agree) raise_disagreement(group.name(), calls);
}

void announce_message(Group& group, const Signature& mine) {
  group.context().store->set(message_key(mine, group.rank(), mine.root), bytes_of(mine));
}

void await_announced_message(c10d::Store& store, int rank, const Signature& mine) {
  const std::string key = message_key(mine, mine.root, rank);
  const Signature theirs = read_signature(store, key);
  store.deleteKey(key);
  if (theirs.hash != mine.hash) raise_disagreement(mine.group, {{mine.root, theirs}, {rank, mine}});
}

}  // namespace tessera::comm
