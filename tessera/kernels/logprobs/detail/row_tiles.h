// Processes the rows of logits in tiles of a few rows, so that the intermediate values stay in a core's cache.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

namespace tessera::kernels::detail {

// Logits [..., V] as matrices of rows: one matrix where the strides allow a view, else one matrix for each index of the
// first dim. Logits are copied only where their strides allow neither.
struct LogitRows {
  explicit LogitRows(const at::Tensor& logits);  // [..., V], of at least one dim
  struct Block {
    at::Tensor matrix;  // [rows, V]
    int64_t first = 0;  // number of the first row among all rows
  };
  std::vector<Block> blocks;
  int64_t rows = 0;
  int64_t columns = 0;
  at::ScalarType wide = at::kFloat;  // compute dtype: float32; float64 for float64 logits
  at::TensorOptions options;         // of the logits

  // Returns the logits of each row at the columns `at_columns` [rows, K], which must be in range: [rows, K] in the
  // logits' dtype.
  at::Tensor gather(const at::Tensor& at_columns) const;
};

struct RowTile {
  int64_t first = 0;
  int64_t rows = 0;
  at::Tensor logits;   // [rows, V], in the logits' dtype
  at::Tensor scratch;  // [rows, V], in the compute dtype, for the visitor to write

  // Returns this tile's rows of `values`, which has one row per row of the logits.
  at::Tensor of(const at::Tensor& values) const { return values.narrow(0, first, rows); }
};

// Calls visit for tiles that together cover all rows. On the CPU several threads visit tiles, each of a size that fits
// its cache. A tile is not visited where `skip` (bool [rows] on the CPU, or undefined) is true for all its rows. A tile
// has at most max_rows rows. A visit must compute each row independently of the other rows of the tile.
void for_row_tiles(const LogitRows& rows, const at::Tensor& skip, const std::function<void(const RowTile&)>& visit,
                   int64_t max_rows = std::numeric_limits<int64_t>::max());

}  // namespace tessera::kernels::detail
