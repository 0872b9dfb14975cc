// Matrix products for sequence parallelism with overlapped communication (asynchronous tensor parallelism): the tokens
// are split into chunks, and the collective of one chunk runs while another chunk is multiplied.
//
//   auto qkv = gathered_products(x, {wq, wk, wv}, {}, along);   // from this rank's tokens: products for all tokens
//   at::Tensor part = scattered_product(y, w, along);           // from all tokens: the product for this rank's tokens
//
// Tokens are sharded as by Shard(1); the number of ranks need not divide their number. All functions and their
// backwards are COLLECTIVE over `along`, and all ranks must pass the same number of chunks. The functions take plain
// tensors, are differentiable once, and raise Error kShape for wrong shapes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/dtensor/functional.h"

namespace tessera {

struct OverlapOptions {
  functional::MeshAxis along;
  int64_t tokens = 0;  // of all ranks together
  int64_t chunks = 2;
};

// All-gathers the tokens and multiplies them with every weight. x [B, own tokens, d]; weights [o_i, d]; biases [o_i],
// where a missing or undefined bias means none. Returns one [B, tokens, o_i] per weight.
std::vector<at::Tensor> gathered_products(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                          const std::vector<at::Tensor>& biases, const OverlapOptions& options);
// Multiplies, and reduce-scatters the product over the tokens. x [B, tokens, i], weight [d, i]. Returns the sum over
// the ranks for this rank's tokens, [B, own tokens, d].
at::Tensor scattered_product(const at::Tensor& x, const at::Tensor& weight, const OverlapOptions& options);

}  // namespace tessera
