// A tensor in boxes on several ranks, as torch.distributed._shard.sharded_tensor.ShardedTensor: what FSDP1 and older
// checkpoints call a sharded value. It has no operations; it is gathered, copied and saved.
//
//   auto sharded = chunk_sharded_tensor(full, group);           // dim 0 in chunks of ceil(n / ranks)
//   for (const auto& local : sharded->local_shards) ...         // none on a rank beyond the last chunk
//   at::Tensor whole = all_gather_sharded_tensor(*sharded);     // COLLECTIVE over the group
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera {

struct ShardMetadata {
  std::vector<int64_t> shard_offsets;
  std::vector<int64_t> shard_sizes;
  std::string placement;  // "rank:1/cpu"
};

struct LocalShard {
  at::Tensor tensor;
  ShardMetadata metadata;
};

struct ShardedTensor {
  std::vector<int64_t> size;  // of the whole
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<ShardMetadata> shards_metadata;  // of all ranks
  std::vector<LocalShard> local_shards;        // this rank's
  std::shared_ptr<comm::Group> group;
};

// "rank:1/cpu", "rank:5/cuda:1": what metadata says of the shard at this position of the group. On an accelerator each
// rank has the device of its number among those that a rank sees, as torch has it; `device` is this rank's own.
std::string shard_placement(const comm::Group& group, int position, c10::Device device);

// This rank's chunk of dim 0 of a tensor that every rank has whole; a copy of it. No communication. Error kShape for
// one without dims.
std::shared_ptr<ShardedTensor> chunk_sharded_tensor(const at::Tensor& full, const std::shared_ptr<comm::Group>& group);

// The same of the rows that each rank has: `own` are those of this rank, contiguous, in any shape. Shares its memory.
// No communication.
std::shared_ptr<ShardedTensor> chunks_of_ranks(const at::Tensor& own, at::IntArrayRef size,
                                               const std::shared_ptr<comm::Group>& group);

// The whole tensor on every rank, on the device of the local shard (the CPU without one). Any boxes, several a rank.
// COLLECTIVE over the tensor's group. Error kShape, alike on all ranks, when the boxes leave gaps, overlap or reach
// beyond the tensor, where upstream gives wrong values silently.
at::Tensor all_gather_sharded_tensor(const ShardedTensor& tensor);

}  // namespace tessera
