// Products of sequence parallelism whose collectives run in chunks while others are multiplied (asynchronous tensor
// parallelism).
//
//   auto qkv = gathered_products(x, {wq, wk, wv}, {}, along);   // of this rank's tokens: products of all tokens
//   at::Tensor part = scattered_product(y, w, along);           // of all tokens: the product of this rank's
//
// Tokens are split as Shard(1) splits them, in any number. All functions are COLLECTIVE over `along`, as are their
// backwards; all ranks must ask for as many chunks. Differentiable, once. Plain tensors. Errors kShape.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/dtensor/functional.h"

namespace tessera {

struct OverlapOptions {
  functional::Along along;
  int64_t tokens = 0;  // of all ranks
  int64_t chunks = 2;
};

// x [B, own tokens, d]; weights [o_i, d]; biases [o_i], undefined or fewer: none. Gives [B, tokens, o_i] each.
std::vector<at::Tensor> gathered_products(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                          const std::vector<at::Tensor>& biases, const OverlapOptions& options);
// x [B, tokens, i], weight [d, i]: the sum over the ranks of their products, [B, own tokens, d].
at::Tensor scattered_product(const at::Tensor& x, const at::Tensor& weight, const OverlapOptions& options);

}  // namespace tessera
