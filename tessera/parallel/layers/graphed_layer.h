// A layer that is to be a graph of its device, as it is in this forward, and what tells recordings of it apart.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/parallel/layers/shown_parameters.h"

namespace tessera {

struct GraphedLayer {
  ShownParameters parameters;
  std::vector<at::Tensor> buffers;
  std::vector<uint64_t> packed;          // PackedWeight::serial
  bool hooked = false, sharded = false;  // modules below it; checkpoints are no hooks
};
// One walk over its modules. Errors kConfig: what cannot be a graph (layer_graphs.h).
GraphedLayer look_at(nn::Module& layer);

// A recording serves the calls of one kind: the same shapes, numbers and wants of gradients, and the same places of
// what stays.
struct RecordingKind {
  std::vector<int64_t> shapes;
  std::vector<uint64_t> packed;
  std::vector<const void*> parameters, buffers;
  bool operator==(const RecordingKind&) const = default;
};
// `call` has numbers.
RecordingKind kind_of(const nn::Module& module, const nn::ForwardCall& call, const GraphedLayer& layer);

// Null where undefined.
std::vector<const void*> addresses(const std::vector<at::Tensor>& tensors);

}  // namespace tessera
