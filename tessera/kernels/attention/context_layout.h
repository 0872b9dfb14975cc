// How the tokens of a sequence are sharded over the ranks of a context-parallel group.
//
//   const ContextLayout layout(/*tokens=*/10, /*ranks=*/2);       // chunks of 3, 3, 2, 2 tokens
//   layout.positions(0);                                          // 0 1 2 8 9
//   at::Tensor own = layout.shard(tokens, /*dim=*/1, rank);       // [B, 5] of [B, 10]
//   at::Tensor all = layout.unshard(group, own, /*dim=*/1);       // [B, 10] on every rank
//
// kBalanced splits the sequence into 2 * ranks chunks of equal length. Where 2 * ranks does not divide the number of
// tokens, the first chunks are one token longer. Rank r holds chunks r and 2 * ranks - 1 - r, so that all ranks compute
// the same amount of causal attention. With equal chunks this is PyTorch's head-tail balancing and NeMo's
// _get_tokens_on_this_cp_rank. kContiguous gives each rank one chunk. The class is a value type and thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera::kernels {

// A chunk of the sequence: the tokens [begin, begin + tokens). The rank that holds the chunk stores it as its local
// tokens [local, local + tokens).
struct ContextChunk {
  int64_t begin = 0, tokens = 0, local = 0;
  int64_t end() const { return begin + tokens; }
};

class ContextLayout {
 public:
  enum class Order : uint8_t { kBalanced, kContiguous };

  // The layout of a sequence of `tokens` tokens over `ranks` ranks. Error kShape for tokens < 0 or ranks < 1.
  ContextLayout(int64_t tokens, int64_t ranks, Order order = Order::kBalanced);
  // The layout of PyTorch's context_parallel: kBalanced where 2 * ranks divides the tokens, else kContiguous.
  static ContextLayout of_pytorch(int64_t tokens, int64_t ranks);

  int64_t tokens() const { return tokens_; }
  int64_t ranks() const { return ranks_; }
  Order order() const { return order_; }
  // Returns the chunks of a rank that have tokens, in ascending order of ContextChunk::begin, which is also the order
  // of ContextChunk::local.
  std::vector<ContextChunk> chunks_of(int64_t rank) const;
  int64_t tokens_of(int64_t rank) const;
  int64_t longest_shard_tokens() const;      // the largest tokens_of(rank)
  at::Tensor positions(int64_t rank) const;  // global, int64 [tokens_of(rank)] on the CPU, ascending
  // Copies the tokens of `rank` from the whole sequence. Differentiable. No communication. Error kShape where `dim` is
  // not `tokens` long.
  at::Tensor shard(const at::Tensor& whole, int64_t dim, int64_t rank) const;
  // All-gathers the shards of all ranks and returns the whole sequence, the same on every rank. Differentiable: the
  // gradient of a shard is the sum of all ranks' gradients of the whole sequence. Where all ranks compute the same
  // loss, the gradient is therefore `ranks` times as large (as in NeMo's allgather_cp_sharded_tensor). COLLECTIVE over
  // the group; the backward pass is COLLECTIVE, too, and keeps the group alive until it has run. Error kShape for a
  // group or a shard of the wrong size.
  at::Tensor unshard(const std::shared_ptr<comm::Group>& group, const at::Tensor& local_shard, int64_t dim) const;

  // The forward and the backward of unshard, for autograd functions that call them directly. all_gather() all-gathers
  // the shards and returns them in the order of the sequence. reduce_scatter() sums `whole` over the ranks and returns
  // this rank's shard of the sum (a reduce-scatter). `dim` is at least 0; results are contiguous. COLLECTIVE over the
  // group; error messages of the collectives contain `name`.
  at::Tensor all_gather(comm::Group& group, const at::Tensor& local_shard, int64_t dim, std::string_view name) const;
  at::Tensor reduce_scatter(comm::Group& group, const at::Tensor& whole, int64_t dim, std::string_view name) const;

 private:
  ContextChunk chunk(int64_t index) const;
  int64_t chunks() const { return order_ == Order::kBalanced ? 2 * ranks_ : ranks_; }
  int64_t tokens_, ranks_;
  Order order_;
};

}  // namespace tessera::kernels
