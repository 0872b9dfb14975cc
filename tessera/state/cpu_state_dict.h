// Copies of state dicts on the CPU, and the local shards of DTensors.
//
//   StateDict shards = get_cpu_state_dict(model_state);      // each rank gets its own shards
//   StateValue whole = to_cpu(weight);                       // COLLECTIVE when weight is a DTensor
//
// The functions have the names of NeMo AutoModel's tensor_utils.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/state/state_value.h"

namespace tessera {

// Returns the local tensor of a DTensor, detached from autograd. Nothing is gathered, and a Partial placement stays
// unreduced. Any other tensor is returned unchanged. No communication.
at::Tensor to_local_if_dtensor(const at::Tensor& tensor);

// Returns contiguous copies of the local tensors on the CPU. The copies are complete on return, and no copy shares
// memory with its source (in PyTorch, scalars do). Nothing is gathered. Values that are not tensors are kept. When a
// name occurs twice in `named_tensors`, the later value is used. For a ShardedTensor the copy is of its local shard,
// and an empty tensor of size [0] on a rank without a shard; Error kShape when this rank has several shards.
// `pin_memory` puts the copies in page-locked memory; without an accelerator there is one warning and the memory is
// ordinary. No communication.
StateDict get_cpu_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& named_tensors,
                             bool pin_memory = false);
StateDict get_cpu_state_dict(const StateDict& state_dict, bool pin_memory = false);

// Returns the whole of a DTensor on every rank, on the CPU. COLLECTIVE over the mesh of the DTensor, on whichever
// device its local tensor is (AutoModel's to_cpu returns only the local tensor of a DTensor on the CPU). A plain tensor
// is copied to the CPU, or returned unchanged when it is there already. Any other value is returned unchanged. Error
// kShape for a DTensor on the meta device.
StateValue to_cpu(const StateValue& value);

}  // namespace tessera
