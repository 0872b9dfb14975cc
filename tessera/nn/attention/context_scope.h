// Attention over ranks for all calls while a scope lives, on its thread and on those that run its backward: what
// context_parallel (parallel/context_parallel/) makes of plain attention.
//
//   const ContextScope scope(how, kernels::ContextLayout::of_pytorch(T, ranks));
//   at::Tensor y = attend(q, k, v, pattern);        // q, k, v of this rank's tokens
//
// Scopes end on the thread that made them; the innermost is in force. One rank.
#pragma once

#include "tessera/comm/group/propagated.h"
#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/nn/attention/context_attention.h"

namespace tessera::nn {

class ContextScope {
 public:
  ContextScope(ContextParallelism how, const kernels::ContextLayout& layout);
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  // Null: none is in force here.
  static const ContextScope* current();

  const kernels::ContextLayout& layout() const { return layout_; }
  at::Tensor positions() const { return layout_.positions(how_.group->rank()); }  // of this rank's tokens, int64
  // What attention_pattern gives inside; it holds after the scope, too, as where a layer is run again for its backward.
  std::shared_ptr<const ContextPattern> pattern(int64_t rows, const ContextPieceOptions& pieces,
                                                const at::TensorOptions& options) const;
  // As nn::attend of one document a row. COLLECTIVE over the group. Error kShape: a pattern made outside, with
  // documents or pieces of its own, tokens that are not this rank's part of the layout.
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionPattern& pattern,
                    const AttentionScores& scores) const;
  // Semantics of at::scaled_dot_product_attention over the whole sequence, without a mask. Error kConfig: attention
  // that is not causal where the layout is balanced.
  at::Tensor scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                                          const AttentionScores& scores) const;

 private:
  ContextParallelism how_;
  kernels::ContextLayout layout_;
  comm::Propagated in_force_;
};

}  // namespace tessera::nn
