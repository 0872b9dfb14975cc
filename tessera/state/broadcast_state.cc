#include "tessera/state/broadcast_state.h"

#include <ATen/ops/empty.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/state/sharded_tensor.h"
#include "tessera/state/state_dict_structure.h"
#include "tessera/state/state_message.h"

namespace tessera {
namespace {

// Broadcasts one leaf of a processed state dict. Every rank takes the same branch for a leaf: rank `root` has the
// tensor where the other ranks have a meta tensor, and all other values, tensors without dims among them, were already
// sent with the dict. Therefore all ranks call the same broadcasts in the same order.
StateValue broadcast_one(comm::Group& group, const StateValue& value, c10::Device device, std::string_view subject,
                         int root) {
  if (!value.is_tensor() && !value.is_sharded()) return value;
  TESSERA_CHECK(value.is_tensor(), ErrorKind::kShape,
                "[fsdp1.broadcast] {}: found a ShardedTensor, expected whole tensors on rank 0", quote(subject));
  const at::Tensor& tensor = value.tensor();
  if (tensor.dim() == 0) return value;
  TESSERA_CHECK(group.rank() == root || tensor.is_meta(), ErrorKind::kShape,
                "[fsdp1.broadcast] {}: For non-zero ranks, a tensor state should have zero dimension, but got the "
                "state with shape {}. Pass what broadcast_processed_state returned.",
                quote(subject), fmt::join(tensor.sizes(), "x"));
  return broadcast_tensor(group, tensor, device, subject, root);
}

}  // namespace

StateDict broadcast_processed_state(comm::Group& group, const StateDict& state, int root) {
  const bool is_root = group.rank() == root;
  std::string packed;
  // Encoding fails for values that cannot be sent. attempt_together makes this error of the root an error of all ranks;
  // otherwise the other ranks would wait for the root in the broadcast.
  comm::attempt_together(group, [&] {
    if (is_root) packed = encode_state(state, TensorsInMessage::kShapes);
  });
  packed = comm::broadcast_bytes(group, packed, root);
  return is_root ? state : decode_state(packed).dict();
}

StateValue broadcast_state(comm::Group& group, const StateValue& value, c10::Device device, std::string_view subject,
                           int root) {
  return map_leaves(value, [&](const StateValue& leaf, const std::string&) {
    return broadcast_one(group, leaf, device, subject, root);
  });
}

at::Tensor broadcast_tensor(comm::Group& group, const at::Tensor& tensor, c10::Device device, std::string_view subject,
                            int root) {
  // The bytes are broadcast, so every dtype works with every back-end. Conjugate and negative views are resolved first,
  // because their bytes are not the values that the tensor has.
  const at::Tensor values = group.rank() == root ? tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()
                                                 : at::empty(tensor.sizes(), tensor.options().device(device));
  if (values.numel() > 0) comm::broadcast(group, values.view({-1}).view(at::kByte), root, subject).wait();
  return values;
}

void check_equal_on_ranks(comm::Group& group, const comm::NamedValues& facts, std::string_view remedy) {
  if (group.size() == 1) return;
  // Each name and value is written with its length, so different facts give different texts. The digest of a text is
  // its length and two hashes. Only if the digests differ does check_same send the facts themselves and throw an error
  // that lists the differences. raise() below is only a safeguard for the case that check_same finds no difference.
  std::string text;
  for (const auto& [name, value] : facts) text += fmt::format("{}:{}{}:{}", name.size(), name, value.size(), value);
  const std::hash<std::string_view> hash;
  const std::string_view whole = text, half = whole.substr(whole.size() / 2);
  const auto digests = comm::all_gather_bytes(group, fmt::format("{}/{}/{}", whole.size(), hash(whole), hash(half)));
  const auto same = [&](const std::string& digest) { return digest == digests[0]; };
  if (std::ranges::all_of(digests, same)) return;
  comm::check_same(group, facts, remedy);
  raise(ErrorKind::kConfig,
        "[fsdp1.agree] the ranks differ: this rank passes {} values, the last one for {}, another rank passes other "
        "values. {}",
        facts.size(), facts.empty() ? "nothing" : facts.back().first, remedy);
}

StateValue clone_state(const StateValue& value) {
  return map_leaves(value, [](const StateValue& leaf, const std::string&) -> StateValue {
    if (leaf.is_tensor()) return leaf.tensor().defined() ? StateValue(leaf.tensor().detach().clone()) : leaf;
    if (!leaf.is_sharded()) return leaf;
    auto copy = std::make_shared<ShardedTensor>(*leaf.sharded());
    for (auto& shard : copy->local_shards) shard.tensor = shard.tensor.detach().clone();
    return copy;
  });
}

}  // namespace tessera
