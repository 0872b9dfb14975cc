// Decoder layers as graphs of their device (CUDA graphs): forward and backward of a layer are one launch each, instead
// of one for each kernel.
//
//   graph_layers(layers, mesh->device());      // after activation checkpoints, before fully_shard
//
// Numbers do not change. A layer runs as ever until two backwards of a shape of batches have run, then it is captured
// and from there on replayed, on memory of its own: what it is given is copied there, and results and gradients are
// copies. That memory, with the activations between forward and backward, stays, once for each shape that still comes
// and each forward whose backward is still to come. What does not repeat runs as ever: a cache, more than a few shapes,
// hooks or sharding on modules within the layer, forwards without autograd, and rows of several documents unless
// attention reads their lengths on the device (DecoderModel::make_documents_repeat; 16 bits, no softcap, heads that its
// kernels take). Inside the module's hooks, so that sharding gathers and frees as without it; parameters must lie at
// the same addresses again (fixed_places of FullyShardOptions and ReplicateOptions). A backward runs once, without
// create_graph, and behind no write to a parameter that autograd would refuse: Error kShape otherwise. Replays go to
// the current stream, the same one for all layers of a call.
//
// A module belongs to one rank; no communication.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

// Errors kConfig: a device without graphs, and, in each forward, too, what a layer's kernels depend on beside tensors
// and shapes: DTensors as parameters, experts, adapters that drop, float8; when it runs, a layer that cannot be
// captured.
void graph_layers(const std::vector<nn::Module*>& layers, c10::Device device);

}  // namespace tessera
