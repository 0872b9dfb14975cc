#include "tessera/kernels/logprobs/detail/row_tiles.h"

#include <ATen/Parallel.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "tessera/kernels/dispatch/result_form.h"

namespace tessera::kernels::detail {
namespace {

constexpr int64_t kCacheElements = 1 << 16;   // elements of a tile on the CPU
constexpr int64_t kDeviceElements = 1 << 24;  // elements of a tile on an accelerator, enough to keep it busy

struct TileSpan {
  size_t block;
  int64_t begin;  // in the block
  int64_t rows;
};

// Divides the rows into tiles, which do not cross the blocks of LogitRows. A tile has about kCacheElements (or
// kDeviceElements) elements, and at least one row.
std::vector<TileSpan> tile_spans(const LogitRows& rows, int64_t max_rows) {
  const int64_t elements = rows.options.device().is_cpu() ? kCacheElements : kDeviceElements;
  const int64_t tile_rows =
      std::clamp<int64_t>(elements / std::max<int64_t>(1, rows.columns), 1, std::max<int64_t>(1, max_rows));
  std::vector<TileSpan> spans;
  for (size_t block = 0; block < rows.blocks.size(); ++block) {
    const int64_t count = rows.blocks[block].matrix.size(0);
    for (int64_t begin = 0; begin < count; begin += tile_rows) {
      spans.push_back({block, begin, std::min(tile_rows, count - begin)});
    }
  }
  return spans;
}

}  // namespace

// Logits whose strides allow a view [rows, V] become one block. Otherwise (for a slice of the sequence, for example)
// each index of the first dim becomes a block; logits of fewer than three dims are copied.
LogitRows::LogitRows(const at::Tensor& input) : options(input.options().requires_grad(false)) {
  const at::Tensor logits = input.detach();  // threads of the pool have grad mode on and would record a graph
  columns = logits.size(-1);
  rows = 1;
  for (int64_t dim = 0; dim + 1 < logits.dim(); ++dim) rows *= logits.size(dim);
  wide = wide_type(logits.scalar_type());
  if (rows == 0) return;
  const std::vector<int64_t> shape = {rows, columns};
  if (at::detail::computeStride(logits.sizes(), logits.strides(), c10::IntArrayRef(shape)) || logits.dim() < 3) {
    blocks.push_back({logits.reshape(shape), 0});
    return;
  }
  const int64_t each = rows / logits.size(0);
  for (int64_t i = 0; i < logits.size(0); ++i) {
    blocks.push_back({logits.select(0, i).reshape({each, columns}), i * each});
  }
}

at::Tensor LogitRows::gather(const at::Tensor& at_columns) const {
  if (blocks.empty()) return at::empty(at_columns.sizes(), options);
  if (blocks.size() == 1) return blocks[0].matrix.gather(1, at_columns);
  std::vector<at::Tensor> parts;
  for (const auto& [matrix, first] : blocks) {
    parts.push_back(matrix.gather(1, at_columns.narrow(0, first, matrix.size(0))));
  }
  return at::cat(parts);
}

void for_row_tiles(const LogitRows& rows, const at::Tensor& skip, const std::function<void(const RowTile&)>& visit,
                   int64_t max_rows) {
  const auto spans = tile_spans(rows, max_rows);
  if (spans.empty()) return;
  const bool on_cpu = rows.options.device().is_cpu();
  const bool* skipped = skip.defined() && on_cpu ? skip.const_data_ptr<bool>() : nullptr;
  int64_t largest = 0;
  for (const auto& span : spans) largest = std::max(largest, span.rows);
  const auto run = [&](int64_t begin, int64_t end) {
    // The AutoDispatchBelowADInplaceOrView guard is set on each thread, because the threads of the pool do not inherit
    // the dispatch state of the calling thread.
    const at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor scratch;
    for (int64_t i = begin; i < end; ++i) {
      const auto& [block, offset, count] = spans[static_cast<size_t>(i)];
      const int64_t first = rows.blocks[block].first + offset;
      if (skipped && std::all_of(skipped + first, skipped + first + count, [](bool each) { return each; })) continue;
      if (!scratch.defined()) scratch = at::empty({largest, rows.columns}, rows.options.dtype(rows.wide));
      visit({first, count, rows.blocks[block].matrix.narrow(0, offset, count), scratch.narrow(0, 0, count)});
    }
  };
  const auto count = static_cast<int64_t>(spans.size());
  if (on_cpu) {
    at::parallel_for(0, count, 1, run);
  } else {
    run(0, count);
  }
}

}  // namespace tessera::kernels::detail
