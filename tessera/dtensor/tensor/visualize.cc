// Implements visualize_sharding().
#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <set>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace tessera {

namespace {

// Divides [0, n) at the start and the end of every span of every rank. Each rank then holds each of the ranges
// completely or not at all.
std::vector<IndexSpan> ranges_of(int64_t n, const std::vector<IndexSpans>& by_rank) {
  std::set<int64_t> edges = {0, n};
  for (const IndexSpans& spans : by_rank) {
    for (const IndexSpan& span : spans) {
      edges.insert(span.start);
      edges.insert(span.start + span.size);
    }
  }
  std::vector<IndexSpan> ranges;
  for (auto at = edges.begin(); std::next(at) != edges.end(); ++at) ranges.push_back({*at, *std::next(at) - *at});
  return ranges;
}

bool holds(const IndexSpans& spans, const IndexSpan& range) {
  for (const IndexSpan& span : spans) {
    if (span.start <= range.start && range.start + range.size <= span.start + span.size) return true;
  }
  return false;
}

std::string text_of(const IndexSpan& range) {
  return range.size == 1 ? fmt::format("{}", range.start)
                         : fmt::format("{}-{}", range.start, range.start + range.size - 1);
}

std::string render(const std::vector<std::vector<std::string>>& cells) {
  std::vector<size_t> widths(cells[0].size());
  for (const auto& row : cells) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : cells) {
    for (size_t i = 0; i < row.size(); ++i) text += fmt::format("{}{:<{}}", i == 0 ? "" : " | ", row[i], widths[i]);
    while (text.back() == ' ') text.pop_back();
    text += '\n';
  }
  return text;
}

}  // namespace

// Each rank computes the index spans of all ranks from the splits, so no communication is needed. A cell of the table
// lists the ranks that hold all elements in its row range and column range.
std::string visualize_sharding(const at::Tensor& tensor) {
  const DTensorImpl& impl = checked_impl("visualize_sharding", tensor);
  TESSERA_CHECK(tensor.dim() == 1 || tensor.dim() == 2, ErrorKind::kShape,
                "[dtensor.visualize_sharding] visualize sharding supports only 1D or 2D DTensor, found shape [{}].",
                fmt::join(tensor.sizes(), ", "));
  const DeviceMesh& mesh = *impl.mesh();
  std::string text = fmt::format("shape [{}], {} on {}\n", fmt::join(tensor.sizes(), ", "),
                                 to_string(impl.placements()), mesh.to_string());
  if (tensor.numel() == 0) return text;
  const ShardSplits splits = shard_splits_of(mesh, impl.placements());
  std::vector<IndexSpans> rows;
  std::vector<IndexSpans> columns;
  for (int64_t position = 0; position < mesh.size(); ++position) {
    const auto coordinate = coordinate_at(mesh, position);
    rows.push_back(local_index_spans(tensor.size(0), 0, mesh, splits, coordinate));
    columns.push_back(tensor.dim() == 2 ? local_index_spans(tensor.size(1), 1, mesh, splits, coordinate)
                                        : IndexSpans{{0, 1}});
  }
  const auto row_ranges = ranges_of(tensor.size(0), rows);
  const auto column_ranges = ranges_of(tensor.dim() == 2 ? tensor.size(1) : 1, columns);
  std::vector<std::vector<std::string>> cells(1 + row_ranges.size());
  cells[0].push_back("");
  for (const IndexSpan& range : column_ranges) cells[0].push_back(tensor.dim() == 2 ? "col " + text_of(range) : "");
  for (size_t i = 0; i < row_ranges.size(); ++i) {
    cells[i + 1].push_back("row " + text_of(row_ranges[i]));
    for (const IndexSpan& column : column_ranges) {
      std::vector<int> ranks;
      for (size_t position = 0; position < rows.size(); ++position) {
        if (holds(rows[position], row_ranges[i]) && holds(columns[position], column)) {
          ranks.push_back(mesh.ranks()[position]);
        }
      }
      cells[i + 1].push_back(
          fmt::format("{}:{}", c10::DeviceTypeName(mesh.device_type(), /*lower_case=*/true), fmt::join(ranks, ",")));
    }
  }
  return text + render(cells);
}

}  // namespace tessera
