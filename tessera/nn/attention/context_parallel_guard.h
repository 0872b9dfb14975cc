// While a ContextParallelGuard exists, all attention calls run over the ranks of a context-parallel group. It applies
// on the thread that made it and on the threads that run the backward of operations under it. context_parallel
// (parallel/context_parallel/) makes the guard.
//
//   const ContextParallelGuard guard(context_parallel, kernels::ContextLayout::of_pytorch(T, ranks));
//   at::Tensor y = attend(q, k, v, pattern);        // q, k, v of this rank's tokens
//
// A guard must be destroyed on the thread that made it. Of nested guards, the innermost one applies. Ranks that run as
// threads of one process must not share a guard.
#pragma once

#include "tessera/comm/group/context_value.h"
#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/nn/attention/context_attention.h"

namespace tessera::nn {

class ContextParallelGuard {
 public:
  ContextParallelGuard(ContextParallelGroup context_parallel, const kernels::ContextLayout& layout);
  ContextParallelGuard(const ContextParallelGuard&) = delete;
  ContextParallelGuard& operator=(const ContextParallelGuard&) = delete;

  // Returns the innermost guard on this thread; null if there is none.
  static const ContextParallelGuard* current();

  const kernels::ContextLayout& layout() const { return layout_; }
  at::Tensor positions() const {
    return layout_.positions(context_parallel_.group->rank());
  }  // of this rank's tokens, int64
  // Returns the pattern that attention_pattern() returns while the guard exists. The pattern can still be used after
  // the guard was destroyed, as is needed when backward recomputes a layer.
  std::shared_ptr<const ContextPattern> pattern(int64_t rows, const ContextPieceOptions& pieces,
                                                const at::TensorOptions& options) const;
  // Implements nn::attend while the guard exists; each row must be one document. COLLECTIVE over the group. Errors
  // kShape: pattern.pieces is not empty (attention_pattern() returned the pattern outside the guard's scope, for
  // several documents per row or for rows longer than the sliding window); the number of tokens is not
  // layout.tokens_of(rank).
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionPattern& pattern,
                    const AttentionScoreOptions& scores) const;
  // Computes at::scaled_dot_product_attention without a mask; each query of this rank sees the keys of all ranks.
  // COLLECTIVE over the group. Error kConfig: non-causal attention with a balanced layout.
  at::Tensor scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                                          const AttentionScoreOptions& scores) const;

 private:
  ContextParallelGroup context_parallel_;
  kernels::ContextLayout layout_;
  comm::ContextValue in_force_;
};

}  // namespace tessera::nn
