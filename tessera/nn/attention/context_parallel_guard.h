// A guard: while it lives, all attention calls run over the ranks of a context-parallel group. It holds on the scope's
// thread and on the threads that run its backward. context_parallel (parallel/context_parallel/) uses it for plain
// attention.
//
//   const ContextParallelGuard guard(context_parallel, kernels::ContextLayout::of_pytorch(T, ranks));
//   at::Tensor y = attend(q, k, v, pattern);        // q, k, v of this rank's tokens
//
// A scope ends on the thread that made it. The innermost scope is in force. A scope belongs to one rank.
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

  // The scope in force on this thread; null: none.
  static const ContextParallelGuard* current();

  const kernels::ContextLayout& layout() const { return layout_; }
  at::Tensor positions() const {
    return layout_.positions(context_parallel_.group->rank());
  }  // of this rank's tokens, int64
  // The pattern that attention_pattern returns in the scope. It stays valid after the scope, for example when backward
  // recomputes a layer.
  std::shared_ptr<const ContextPattern> pattern(int64_t rows, const ContextPieceOptions& pieces,
                                                const at::TensorOptions& options) const;
  // nn::attend for one document per row. COLLECTIVE over the group. Error kShape: a pattern made outside of the scope,
  // with documents or pieces of its own; a number of tokens that is not this rank's shard in the layout.
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionPattern& pattern,
                    const AttentionScoreOptions& scores) const;
  // at::scaled_dot_product_attention over the whole sequence, without a mask. Error kConfig: non-causal attention with
  // a balanced layout.
  at::Tensor scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                                          const AttentionScoreOptions& scores) const;

 private:
  ContextParallelGroup context_parallel_;
  kernels::ContextLayout layout_;
  comm::ContextValue in_force_;
};

}  // namespace tessera::nn
