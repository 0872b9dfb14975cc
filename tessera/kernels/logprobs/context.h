// NeMo's helpers for log-probs of tokens that are sharded over a context-parallel (CP) group.
//
//   at::Tensor own = get_tokens_on_this_cp_rank(tokens, rank, size);            // [B, T] -> [B, T / size]
//   at::Tensor all = allgather_cp_sharded_tensor(logprobs, cp);                 // [B, T / size] -> [B, T]
//
// The functions have the semantics of nemo_rl.distributed.model_utils and the same names, without the leading
// underscore. "Balanced" means ContextLayout::Order::kBalanced (kernels/attention/context_layout.h). Lengths that 2 *
// size does not divide are supported, too. A function with a group is COLLECTIVE over the group, and so is its backward
// pass. With a null group or a group of one rank the function returns its input. No second derivatives. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "tessera/comm/group/group.h"

namespace tessera::kernels {

// This rank's balanced shard of a whole tensor. No communication.
at::Tensor get_tokens_on_this_cp_rank(const at::Tensor& input, int64_t cp_rank, int64_t cp_size, int64_t seq_dim = 1);

// All-gathers the shards into the whole tensor, in the order of the sequence. The gradient of a shard is the sum of all
// ranks' gradients of the whole tensor: where all ranks compute the same loss, it is `size` times the loss's gradient.
// Error kShape if no sequence length gives shards of these sizes in ContextLayout::Order::kBalanced.
at::Tensor allgather_cp_sharded_tensor(const at::Tensor& tensor, const std::shared_ptr<comm::Group>& group,
                                       int64_t seq_dim = 1);

// Exchanges this rank's balanced shard for its contiguous shard [r * L, (r + 1) * L), both of L tokens. Differentiable.
// Error kShape where ranks have different numbers of tokens.
at::Tensor cp_load_balanced_to_contiguous(const at::Tensor& tensor, const std::shared_ptr<comm::Group>& group,
                                          int64_t seq_dim = 1);

// For contiguous shards [..., L]: returns for each element the next element of the sequence, also across the border to
// the next rank. The last element of the whole sequence gets `fill`. Without a gradient, for ids and masks. Error
// kShape for a shard without tokens or a shard that requires a gradient.
at::Tensor cp_shift_next(const at::Tensor& x, const std::shared_ptr<comm::Group>& group, const at::Scalar& fill);

// The sum of x over the ranks. The backward passes the gradient through unchanged.
at::Tensor all_reduce_sum(const at::Tensor& x, const std::shared_ptr<comm::Group>& group);

}  // namespace tessera::kernels
