// A tensor that is divided into boxes on several ranks, as torch.distributed._shard.sharded_tensor.ShardedTensor. FSDP1
// and older checkpoints save sharded values in this form. It has no operations: it can only be gathered, copied and
// saved.
//
//   auto sharded = chunk_sharded_tensor(full, group);           // dim 0 in chunks of ceil(n / ranks); a rank beyond
//                                                               // the last chunk has no shard
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
  std::vector<int64_t> size;  // of the whole tensor
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<ShardMetadata> shards_metadata;  // shards of all ranks
  std::vector<LocalShard> local_shards;        // shards of this rank
  std::shared_ptr<comm::Group> group;
};

// Returns the placement text of the shard of group rank `position`, such as "rank:1/cpu" or "rank:5/cuda:1". `device`
// is this rank's device. On an accelerator, the device index of a rank is its global rank modulo the number of devices
// that a rank sees, as in torch.
std::string shard_placement(const comm::Group& group, int position, c10::Device device);

// Returns a ShardedTensor whose local shard is a copy of this rank's chunk of dim 0. Every rank passes the whole
// tensor. No communication. Error kShape for a tensor without dims.
std::shared_ptr<ShardedTensor> chunk_sharded_tensor(const at::Tensor& full, const std::shared_ptr<comm::Group>& group);

// Returns a ShardedTensor of shape `size`, divided as by chunk_sharded_tensor(), from the rows that each rank has.
// `own` holds this rank's rows, is contiguous and may have any shape. The local shard shares memory with `own`. No
// communication.
std::shared_ptr<ShardedTensor> chunks_of_ranks(const at::Tensor& own, at::IntArrayRef size,
                                               const std::shared_ptr<comm::Group>& group);

// Returns the whole tensor on every rank, on the device of the local shard (the CPU on a rank without one). The shards
// may be any boxes, several per rank. COLLECTIVE over the tensor's group. Error kShape, on all ranks, when the boxes
// leave gaps, overlap or reach beyond the tensor; PyTorch returns wrong values without an error in these cases.
at::Tensor all_gather_sharded_tensor(const ShardedTensor& tensor);

}  // namespace tessera
