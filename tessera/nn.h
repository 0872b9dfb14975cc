// Modules, layers, attention, experts and low-rank adapters. PyTorch: torch.nn.
//
//   struct Net : nn::Callable<Net> {
//     std::shared_ptr<nn::Linear> out;
//     at::Tensor forward(const at::Tensor& x) { return (*out)(x); }
//   };
#pragma once

#include "tessera/dtensor.h"
#include "tessera/nn/attention/attention.h"
#include "tessera/nn/experts/moe.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/linear/float8.h"
#include "tessera/nn/linear/lora.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tessera/nn/module.h"
