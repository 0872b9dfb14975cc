// Captures decoder layers as CUDA graphs: forward and backward of a layer are one launch each, instead of one launch
// per kernel.
//
//   graph_layers(layers, mesh->device());      // after activation checkpoints, before fully_shard
//
// Results do not change. A layer first runs eagerly until two backwards of a batch shape have run. Then it is captured,
// and later calls replay it. A graph has its own memory: inputs are copied into this memory, and results and gradients
// are copied out. The memory, which includes the activations between forward and backward, stays allocated for each
// batch shape in use and each forward whose backward has not run.
//
// These calls run eagerly: calls with a KV cache, calls with a fifth batch shape while four others are in use, calls of
// layers inside which some module has hooks or is sharded, calls with gradients disabled, and calls for rows of several
// documents. Rows of several documents can be replayed if attention reads the document lengths on the device
// (DecoderModel::pad_document_lists; 16-bit dtypes, no softcap, head sizes that its kernels support).
//
// The graphs are replayed between the module's hooks, so FSDP gathers and frees parameters as it does without graphs.
// The parameters must have the same addresses in every call (fixed_addresses of FullyShardOptions and
// ReplicateOptions). Replays run on the current stream, which must be the same for all layers of a call. Errors kShape
// in backward: a second backward through the same call, a backward with create_graph, parameters at other addresses
// than in forward, and a write to a parameter between forward and backward that autograd would refuse.
//
// A module belongs to one rank; no communication.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

// From now on forward and backward of each of `layers` are captured as CUDA graphs and replayed, as described at the
// top of this file. Errors kConfig: a device without graphs; a layer whose kernels depend on more than tensors and
// shapes, checked here and in each forward (DTensor parameters, experts, adapters with dropout, float8 products); in a
// forward or backward, a layer that cannot be captured.
void graph_layers(const std::vector<nn::Module*>& layers, c10::Device device);

}  // namespace tessera
