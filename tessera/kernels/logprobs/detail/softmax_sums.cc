#include "tessera/kernels/logprobs/detail/softmax_sums.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::kernels::detail {
namespace {

constexpr double kNoLogit = -std::numeric_limits<double>::infinity();

}  // namespace

at::Tensor finite_max(const at::Tensor& maximum) { return maximum.masked_fill(maximum.eq(kNoLogit), 0); }

// In a row that has only -infinity, 0 is subtracted instead of the maximum, so that its exponentials are 0 and not NaN.
at::Tensor softmax_sums_of_tile(const RowTile& tile, const SoftmaxSums& sums) {
  const auto maximum = tile.logits.amax(1, true).to(tile.scratch.scalar_type());
  const auto taken = finite_max(maximum);
  at::Tensor scratch = tile.scratch;
  at::sub_out(scratch, tile.logits, taken);
  scratch.exp_();
  tile.of(sums.maximum).copy_(maximum.squeeze(1));
  tile.of(sums.sum).copy_(scratch.sum(1));
  return taken;
}

SoftmaxSums softmax_sums(const LogitRows& rows, const at::Tensor& skip, int64_t max_rows) {
  const auto options = rows.options.dtype(at::kDouble);
  const SoftmaxSums sums{at::full({rows.rows}, kNoLogit, options), at::zeros({rows.rows}, options)};
  if (rows.columns == 0) return sums;
  for_row_tiles(
      rows, skip, [&](const RowTile& tile) { softmax_sums_of_tile(tile, sums); }, max_rows);
  return sums;
}

// Functions that sum over the ranks call this all-gather and sum its result, in place of an all-reduce. Every rank then
// adds the tensors in rank order, so all ranks get the same bits.
at::Tensor all_gather_shards(const VocabShard& part, const at::Tensor& own) {
  if (part.size() == 1) return own.unsqueeze(0);
  std::vector<int64_t> shape = {part.size()};
  shape.insert(shape.end(), own.sizes().begin(), own.sizes().end());
  const at::Tensor all = at::empty(shape, own.options());
  if (own.numel() > 0) comm::all_gather_into(*part.group, all, own.contiguous(), "log-probs").wait();
  return all;
}

// With M the largest `maximum` of all ranks, a rank's sum is multiplied by the factor exp(maximum - M), because sum
// exp(x - M) = exp(maximum - M) sum exp(x - maximum). A rank without finite logits has the factor 0.
MergedSoftmaxSums merge_softmax_sums(const at::Tensor& maximum, const at::Tensor& sum) {
  MergedSoftmaxSums merged;
  merged.all.maximum = maximum.amax(0);
  merged.factors = maximum.sub(finite_max(merged.all.maximum)).exp_();
  merged.all.sum = sum.mul(merged.factors).sum(0);
  return merged;
}

// A chunk contains chunk_size positions of the dim before the vocabulary, for all indices of the dims before that one.
// A chunk_size above 2^32 counts as 2^32, so that the product does not overflow.
int64_t rows_of_chunk(const char* verb, const at::Tensor& logits, int64_t chunk_size) {
  TESSERA_CHECK(chunk_size > 0, ErrorKind::kShape, "[kernels.{}] chunk_size: found {}, wanted at least 1", verb,
                chunk_size);
  int64_t others = 1;
  for (int64_t dim = 0; dim + 2 < logits.dim(); ++dim) others *= logits.size(dim);
  return std::max<int64_t>(1, others) * std::min<int64_t>(chunk_size, int64_t{1} << 32);
}

void check_vocab_shard(const char* verb, const at::Tensor& logits, const VocabShard& part) {
  TESSERA_CHECK(!is_dtensor(logits), ErrorKind::kShape,
                "[kernels.{}] logits: found a DTensor, wanted this rank's columns. Use "
                "get_logprobs_from_vocab_parallel_logits, or to_local.",
                verb);
  TESSERA_CHECK(logits.dim() >= 1 && logits.is_floating_point(), ErrorKind::kShape,
                "[kernels.{}] logits: found {} dims of {}, wanted [..., V] of a floating dtype", verb, logits.dim(),
                c10::toString(logits.scalar_type()));
  TESSERA_CHECK(part.start >= 0 && part.end - part.start == logits.size(-1), ErrorKind::kShape,
                "[kernels.{}] found logits of {} columns for the vocabulary part [{}, {}), wanted one column per id "
                "of the part",
                verb, logits.size(-1), part.start, part.end);
}

void refuse_second_derivative(const char* verb) {
  TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kInternal,
                "[kernels.{}] has no second derivative. Differentiate log_softmax instead, or without create_graph.",
                verb);
}

}  // namespace tessera::kernels::detail
