// Values on the CPU, and this rank's part of a tensor.
//
//   StateDict shards = get_cpu_state_dict(model_state);      // each rank its own shards
//   StateValue whole = to_cpu(weight);                       // COLLECTIVE when weight is a DTensor
//
// Names of NeMo AutoModel's tensor_utils.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/state/state_value.h"

namespace tessera {

// The local part of a DTensor, without gradients: nothing is gathered, pending sums stay pending. Any other tensor is
// returned itself. No communication.
at::Tensor to_local_if_dtensor(const at::Tensor& tensor);

// Contiguous copies on the CPU of the local parts, complete on return; nothing is gathered, and no result shares memory
// with its source (PyTorch's scalars do). Later values of a name overwrite earlier ones. Other values of a dict are
// kept. pin_memory: in page-locked memory; without an accelerator a warning, once. No communication. Of a ShardedTensor
// the local shard; [0] on ranks that have none. Error kShape for several.
StateDict get_cpu_state_dict(const std::vector<std::pair<std::string, at::Tensor>>& named_tensors,
                             bool pin_memory = false);
StateDict get_cpu_state_dict(const StateDict& state_dict, bool pin_memory = false);

// The whole of a DTensor on every rank, from any device: COLLECTIVE over its mesh (AutoModel's gives the local part of
// one that is on the CPU already). A plain tensor on the CPU, itself when it is there; anything else as it is. Error
// kShape for a DTensor on the meta device.
StateValue to_cpu(const StateValue& value);

}  // namespace tessera
