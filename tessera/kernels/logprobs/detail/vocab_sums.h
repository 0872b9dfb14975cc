// What the parts of a vocabulary add up to, row by row: the one place where ranks talk about logits.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/logprobs/detail/row_tiles.h"
#include "tessera/kernels/logprobs/vocab_part.h"

namespace tessera::kernels::detail {

// Of each row: the largest logit, and the sum of exp(logit - largest). float64 [rows]. -infinity and 0 where a part has
// no columns, or none but -infinity.
struct RowSums {
  at::Tensor most;
  at::Tensor sum;
};
// Of this rank's columns.
RowSums row_sums(const LogitRows& rows, const at::Tensor& skip = {},
                 int64_t most_rows = std::numeric_limits<int64_t>::max());
// Writes most and sum of one tile and leaves exp(logit - most) in its scratch; what is taken off, wide [rows, 1] (0
// where most is -infinity).
at::Tensor tile_sums(const RowTile& tile, const RowSums& sums);

// [size, rows, count]: the float64 [rows, count] of all ranks of the part, in their order. COLLECTIVE over its group;
// without one, its own.
at::Tensor gather_parts(const VocabPart& part, const at::Tensor& own);
// Brings `most` and `sum` [size, rows] of all ranks together; factors [size, rows] are what a rank's sums count by.
struct JoinedSums {
  RowSums all;         // [rows]
  at::Tensor factors;  // exp(own most - most of all)
};
JoinedSums join_sums(const at::Tensor& most, const at::Tensor& sum);
// 0 in place of -infinity: what may be taken off -infinity.
at::Tensor finite_most(const at::Tensor& most);

// Rows of a chunk of the dim before the vocabulary. Error kShape below 1.
int64_t rows_of_chunk(const char* verb, const at::Tensor& logits, int64_t chunk_size);
// Error kShape: DTensors, logits of fewer than one dim or another number of columns than the part's, dtypes that are
// not floating.
void check_part(const char* verb, const at::Tensor& logits, const VocabPart& part);
// Error kInternal where a second derivative is asked for, which these operations lack.
void refuse_second_derivative(const char* verb);

}  // namespace tessera::kernels::detail
