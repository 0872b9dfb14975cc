// How the tokens of a sequence lie over the ranks of a context-parallel group: which global positions a rank holds.
//
//   const ContextLayout layout(/*tokens=*/10, /*ranks=*/2);       // chunks of 3, 3, 2, 2 tokens
//   layout.positions(0);                                          // 0 1 2 8 9
//   at::Tensor own = layout.shard(tokens, /*dim=*/1, rank);       // [B, 5] of [B, 10]
//   at::Tensor all = layout.unshard(group, own, /*dim=*/1);       // [B, 10] on every rank
//
// kBalanced cuts the sequence in 2 * ranks chunks of equal length, the first ones a token longer where it does not
// divide; rank r holds chunks r and 2 * ranks - 1 - r, so that all ranks have as much causal attention to compute.
// Where it divides, this is PyTorch's head-tail balancing and NeMo's _get_tokens_on_this_cp_rank. kContiguous gives
// each rank one chunk. A value type, thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera::kernels {

// Tokens [begin, begin + tokens) of the sequence, which are tokens [local, local + tokens) of the rank that holds them.
struct ContextChunk {
  int64_t begin = 0, tokens = 0, local = 0;
  int64_t end() const { return begin + tokens; }
};

class ContextLayout {
 public:
  enum class Order : uint8_t { kBalanced, kContiguous };

  // Error kShape: no ranks, fewer tokens than none.
  ContextLayout(int64_t tokens, int64_t ranks, Order order = Order::kBalanced);
  // What PyTorch's context_parallel does: balanced where 2 * ranks divides the tokens, else contiguous.
  static ContextLayout of_pytorch(int64_t tokens, int64_t ranks);

  int64_t tokens() const { return tokens_; }
  int64_t ranks() const { return ranks_; }
  Order order() const { return order_; }
  // In ascending order, here and there; none of them empty.
  std::vector<ContextChunk> chunks_of(int64_t rank) const;
  int64_t tokens_of(int64_t rank) const;
  int64_t most_tokens() const;               // that a rank holds
  at::Tensor positions(int64_t rank) const;  // int64 [tokens_of(rank)] on the CPU, ascending
  // A copy of the rank's part. Differentiable. Error kShape for a dim of another length. No communication.
  at::Tensor shard(const at::Tensor& whole, int64_t dim, int64_t rank) const;
  // The whole of what every rank has a part of, alike on all. Differentiable: a part's gradient is the sum over the
  // ranks of what they make of it, so that of a loss which all ranks compute alike comes out `ranks` times as large
  // (as NeMo's allgather_cp_sharded_tensor). COLLECTIVE over the group, as is the backward pass, which holds the group
  // until then. Error kShape for a group or a part of another size.
  at::Tensor unshard(const std::shared_ptr<comm::Group>& group, const at::Tensor& own, int64_t dim) const;

  // What unshard and its backward pass do, for functions that have a derivative of their own: the parts of all ranks in
  // the order of the sequence; of each rank's whole the sum, this rank's part of it. dim at least 0, contiguous
  // results. COLLECTIVE over the group, under `name` in its records.
  at::Tensor gathered(comm::Group& group, const at::Tensor& own, int64_t dim, std::string_view name) const;
  at::Tensor scattered_sum(comm::Group& group, const at::Tensor& whole, int64_t dim, std::string_view name) const;

 private:
  ContextChunk chunk(int64_t index) const;
  int64_t chunks() const { return order_ == Order::kBalanced ? 2 * ranks_ : ranks_; }
  int64_t tokens_, ranks_;
  Order order_;
};

}  // namespace tessera::kernels
