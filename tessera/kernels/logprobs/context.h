// Tensors whose tokens lie over a context-parallel group: NeMo's helpers for log-probs under it.
//
//   at::Tensor own = get_tokens_on_this_cp_rank(tokens, rank, size);            // [B, T] -> [B, T / size]
//   at::Tensor all = allgather_cp_sharded_tensor(logprobs, cp);                 // [B, T / size] -> [B, T]
//
// Semantics of nemo_rl.distributed.model_utils, names without the underscore before them. "Balanced" is the order of
// ContextLayout (context_layout.h), which also takes lengths that 2 * size does not divide. Functions that take a group
// are COLLECTIVE over it, as are their backward passes; a null group, or one of one rank, gives what was given. No
// second derivatives. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "tessera/comm/group/group.h"

namespace tessera::kernels {

// This rank's part of a whole tensor, balanced. No communication.
at::Tensor get_tokens_on_this_cp_rank(const at::Tensor& input, int64_t cp_rank, int64_t cp_size, int64_t seq_dim = 1);

// The whole in the order of the sequence. A part's gradient is the sum over the ranks of what they make of it: of a
// loss that all compute alike, `size` times its gradient. Error kShape where the parts are not those of a balanced
// sequence.
at::Tensor allgather_cp_sharded_tensor(const at::Tensor& tensor, const std::shared_ptr<comm::Group>& group,
                                       int64_t seq_dim = 1);

// From the balanced part of a rank to its contiguous one, both of L tokens: [r * L, (r + 1) * L). Differentiable. Error
// kShape where ranks have different numbers of tokens.
at::Tensor cp_load_balanced_to_contiguous(const at::Tensor& tensor, const std::shared_ptr<comm::Group>& group,
                                          int64_t seq_dim = 1);

// Of contiguous parts [..., L]: the element after each, over the ranks' borders; behind the last of all, `fill`. No
// gradient: for ids and masks. Error kShape for a part of no tokens or one that needs a gradient.
at::Tensor cp_shift_next(const at::Tensor& x, const std::shared_ptr<comm::Group>& group, const at::Scalar& fill);

// The sum over the ranks; the gradient passes as it is.
at::Tensor all_reduce_sum(const at::Tensor& x, const std::shared_ptr<comm::Group>& group);

}  // namespace tessera::kernels
