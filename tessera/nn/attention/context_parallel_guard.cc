#include "tessera/nn/attention/context_scope.h"

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

const comm::PropagatedKind kContext{"context_parallel"};

}  // namespace

ContextScope::ContextScope(ContextParallelism how, const kernels::ContextLayout& layout)
    : how_(std::move(how)), layout_(layout), in_force_(kContext, this) {}

const ContextScope* ContextScope::current() {
  return static_cast<const ContextScope*>(comm::Propagated::innermost(kContext));
}

at::Tensor ContextScope::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const AttentionPattern& pattern, const AttentionScores& scores) const {
  TESSERA_CHECK(
      pattern.pieces.empty(), ErrorKind::kShape,
      "[context_parallel] found an attention pattern of {} pieces inside a context_parallel scope, which "
      "supports one document per row. Make the pattern in the scope, or use apply_context_parallel for packed "
      "rows.",
      pattern.pieces.size());
  const auto over_ranks = this->pattern(q.size(0), {.sliding_window = pattern.sliding_window}, q.options());
  return attend_context(q, k, v, over_ranks, scores);
}

at::Tensor ContextScope::scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                      bool causal, const AttentionScores& scores) const {
  TESSERA_CHECK(
      causal || layout_.order() == kernels::ContextLayout::Order::kContiguous, ErrorKind::kConfig,
      "[context_parallel] Load balancing requires `is_causal=True`. Found non-causal attention over {} tokens on "
      "{} ranks with a balanced layout.",
      layout_.tokens(), layout_.ranks());
  return attend_context(q, k, v, pattern(q.size(0), {.causal = causal}, q.options()), scores);
}

std::shared_ptr<const ContextPattern> ContextScope::pattern(int64_t rows, const ContextPieceOptions& pieces,
                                                            const at::TensorOptions& options) const {
  const auto sequence = std::make_shared<ContextSequence>(
      ContextSequence{how_, layout_, {{.row = 0, .rows = rows, .documents = {{0, layout_.tokens()}}}}, rows});
  return context_pattern(sequence, pieces, options);
}

}  // namespace tessera::nn
