#include "tessera/nn/attention/context_parallel_guard.h"

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

const comm::ContextKey kContext{"context_parallel"};

}  // namespace

ContextParallelGuard::ContextParallelGuard(ContextParallelGroup context_parallel, const kernels::ContextLayout& layout)
    : context_parallel_(std::move(context_parallel)), layout_(layout), in_force_(kContext, this) {}

const ContextParallelGuard* ContextParallelGuard::current() {
  return static_cast<const ContextParallelGuard*>(comm::ContextValue::innermost(kContext));
}

at::Tensor ContextParallelGuard::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const AttentionPattern& pattern, const AttentionScoreOptions& scores) const {
  TESSERA_CHECK(
      pattern.pieces.empty(), ErrorKind::kShape,
      "[context_parallel] found an attention pattern of {} pieces inside a context_parallel scope, which "
      "supports one document per row. Make the pattern in the scope, or use apply_context_parallel for packed "
      "rows.",
      pattern.pieces.size());
  const auto over_ranks = this->pattern(q.size(0), {.sliding_window = pattern.sliding_window}, q.options());
  return attend_context(q, k, v, over_ranks, scores);
}

at::Tensor ContextParallelGuard::scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k,
                                                              const at::Tensor& v, bool causal,
                                                              const AttentionScoreOptions& scores) const {
  TESSERA_CHECK(
      causal || layout_.order() == kernels::ContextLayout::Order::kContiguous, ErrorKind::kConfig,
      "[context_parallel] Load balancing requires `is_causal=True`. Found non-causal attention over {} tokens on "
      "{} ranks with a balanced layout.",
      layout_.tokens(), layout_.ranks());
  return attend_context(q, k, v, pattern(q.size(0), {.causal = causal}, q.options()), scores);
}

std::shared_ptr<const ContextPattern> ContextParallelGuard::pattern(int64_t rows, const ContextPieceOptions& pieces,
                                                                    const at::TensorOptions& options) const {
  const auto sequence = std::make_shared<ContextSequence>(ContextSequence{
      context_parallel_, layout_, {{.row = 0, .rows = rows, .documents = {{0, layout_.tokens()}}}}, rows});
  return context_pattern(sequence, pieces, options);
}

}  // namespace tessera::nn
