// Softmax statistics per row of a sharded vocabulary, and their all-gather over the ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/logprobs/detail/row_tiles.h"
#include "tessera/kernels/logprobs/vocab_shard.h"

namespace tessera::kernels::detail {

// Per row: the largest logit, and the sum of exp(logit - largest). float64 [rows]. A row without columns, or with
// -infinity only, has -infinity and 0.
struct SoftmaxSums {
  at::Tensor maximum;
  at::Tensor sum;
};
// Returns the statistics of this rank's columns. `skip`: bool [rows], used on the CPU only. If `skip` is true for all
// rows of a tile, the tile is not computed: its rows have maximum -infinity and sum 0.
SoftmaxSums softmax_sums(const LogitRows& rows, const at::Tensor& skip = {},
                         int64_t max_rows = std::numeric_limits<int64_t>::max());
// Writes `maximum` and `sum` of one tile and leaves exp(logit - maximum) in tile.scratch. Returns the subtracted maxima
// in the compute dtype, [rows, 1]: 0 where the maximum is -infinity.
at::Tensor softmax_sums_of_tile(const RowTile& tile, const SoftmaxSums& sums);

// All-gathers `own`, float64 [rows, count], over part.group, the ranks that share the vocabulary. Returns [size, rows,
// count] in the order of the group's ranks; without a group, [1, rows, count]. COLLECTIVE over part.group.
at::Tensor all_gather_shards(const VocabShard& part, const at::Tensor& own);
// Combines `maximum` and `sum` [size, rows] of all ranks. factors [size, rows] rescale a rank's sums to the common
// maximum.
struct MergedSoftmaxSums {
  SoftmaxSums all;     // [rows]
  at::Tensor factors;  // exp(maximum of the rank - maximum of all ranks)
};
MergedSoftmaxSums merge_softmax_sums(const at::Tensor& maximum, const at::Tensor& sum);
// Returns `maximum` with 0 in place of -infinity, so that subtracting it from -infinity gives no NaN.
at::Tensor finite_max(const at::Tensor& maximum);

// Returns the number of rows in a chunk of chunk_size positions of the dim before the vocabulary. Error kShape for a
// chunk_size below 1.
int64_t rows_of_chunk(const char* verb, const at::Tensor& logits, int64_t chunk_size);
// Checks that `logits` are plain floating-point tensors with one column for each vocabulary id of `part`. Error kShape
// for DTensors, for logits without a dim or with a number of columns other than part.end - part.start, and for other
// dtypes.
void check_vocab_shard(const char* verb, const at::Tensor& logits, const VocabShard& part);
// Error kInternal inside a double backward, which these operations do not support.
void refuse_second_derivative(const char* verb);

}  // namespace tessera::kernels::detail
