// Passes over the rows of logits a few rows at a time, so that what is made of them stays in a core's cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace tessera::kernels::detail {

// Logits [..., V] as matrices of rows without a copy: one where the strides allow, else one for each index of the first
// dim.
struct LogitRows {
  explicit LogitRows(const at::Tensor& logits);  // [..., V], of at least one dim
  struct Block {
    at::Tensor matrix;  // [rows, V]
    int64_t first = 0;  // number of the first row
  };
  std::vector<Block> blocks;
  int64_t rows = 0;
  int64_t columns = 0;
  at::ScalarType wide = at::kFloat;  // what is computed in: float32, float64 for float64
  at::TensorOptions options;         // of the logits

  // [rows, K]: of each row the columns that `columns` [rows, K] (all in range) says, in the logits' dtype.
  at::Tensor gather(const at::Tensor& columns) const;
};

struct RowTile {
  int64_t first = 0;
  int64_t rows = 0;
  at::Tensor logits;   // [rows, V], in their own dtype
  at::Tensor scratch;  // the same, wide, to be written

  // The tile's rows of what has one row for each of the logits'.
  at::Tensor of(const at::Tensor& values) const { return values.narrow(0, first, rows); }
};

// Visits all rows; on the CPU several threads do, each within its cache. `skip` (bool [rows] on the CPU, or undefined):
// tiles all of whose rows it names are left out. What a visit computes of a row does not depend on its tile. most_rows
// bounds a tile.
void for_row_tiles(const LogitRows& rows, const at::Tensor& skip, const std::function<void(const RowTile&)>& visit,
                   int64_t most_rows = std::numeric_limits<int64_t>::max());

}  // namespace tessera::kernels::detail
