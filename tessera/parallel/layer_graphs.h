// Decoder layers as graphs of their device (CUDA graphs): forward and backward of a layer are one launch each, instead
// of one for each kernel.
//
//   graph_layers(layers, mesh->device());      // after activation checkpoints, before fully_shard
//
// Numbers do not change. A layer runs as ever the first times that it sees certain shapes, then it is captured and from
// there on replayed, on memory of its own: what it is given is copied there, and results and gradients are copies. That
// memory, with the activations between forward and backward, stays; forwards whose backward is still to come have some
// each, and so has each shape of batches that still comes. What does not repeat runs as ever: a cache, more than a few
// shapes, hooks on modules within the layer, forwards without autograd, and rows of several documents but in 16 bits,
// where attention reads their lengths on the device (DecoderModel::make_documents_repeat). Inside the module's hooks,
// so that sharding gathers and frees as without it; parameters must lie at the same addresses again
// (FullyShardOptions::fixed_places; replicas do).
//
// A module belongs to one rank; no communication.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

// Errors kConfig: a device without graphs, and what a layer's kernels depend on beside tensors and shapes: DTensors as
// parameters, experts, adapters that drop, float8; when it runs, a layer that cannot be captured.
void graph_layers(const std::vector<nn::Module*>& layers, c10::Device device);

}  // namespace tessera
