// The state of a layer that decides whether it can be captured as a CUDA graph, and which recording fits a call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/parallel/layers/forward_parameters.h"

namespace tessera {

// The result of inspect_layer: the tensors of a layer in one forward.
struct LayerSnapshot {
  ForwardParameters parameters;
  std::vector<at::Tensor> buffers;
  std::vector<uint64_t> packed;  // PackedWeight::serial of each packed weight
  // hooked: some module below the layer has hooks (activation checkpoints do not count). sharded: some module below the
  // layer is sharded.
  bool hooked = false, sharded = false;
};
// Inspects all modules of a layer. Errors kConfig: a layer that cannot be a graph, with the reasons listed in
// layer_graphs.h.
LayerSnapshot inspect_layer(nn::Module& layer);

// The key of a recording. A recording can be replayed for all calls with equal input shapes, dtypes, requires_grad
// flags and ForwardCall::numbers, and with parameters and buffers at the same addresses.
struct RecordingKey {
  std::vector<int64_t> shapes;  // shapes, dtypes, requires_grad, strides and ForwardCall::numbers in one list
  std::vector<uint64_t> packed;
  std::vector<const void*> parameters, buffers;
  bool operator==(const RecordingKey&) const = default;
};
// Returns the key of the recording that can be replayed for `call`. call.numbers must be set.
RecordingKey recording_key(const nn::Module& module, const nn::ForwardCall& call, const LayerSnapshot& layer);

// Returns the data pointer of each tensor; null for an undefined tensor.
std::vector<const void*> addresses(const std::vector<at::Tensor>& tensors);

}  // namespace tessera
