// The table of visualize_sharding().
#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <set>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace tessera {

namespace {

// Divides [0, n) at all ends of all ranks' runs. Each rank then holds a range completely or not at all.
std::vector<Run> ranges_of(int64_t n, const std::vector<Runs>& by_rank) {
  std::set<int64_t> edges = {0, n};
  for (const Runs& runs : by_rank) {
    for (const Run& run : runs) {
      edges.insert(run.start);
      edges.insert(run.start + run.size);
    }
  }
  std::vector<Run> ranges;
  for (auto at = edges.begin(); std::next(at) != edges.end(); ++at) ranges.push_back({*at, *std::next(at) - *at});
  return ranges;
}

bool holds(const Runs& runs, const Run& range) {
  for (const Run& run : runs) {
    if (run.start <= range.start && range.start + range.size <= run.start + run.size) return true;
  }
  return false;
}

std::string text_of(const Run& range) {
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

// The cuts give the runs of every rank of the mesh, so no communication is needed. A cell lists the ranks that hold the
// whole block of a row range and a column range.
std::string visualize_sharding(const at::Tensor& tensor) {
  const DTensorImpl& impl = checked_impl("visualize_sharding", tensor);
  TESSERA_CHECK(tensor.dim() == 1 || tensor.dim() == 2, ErrorKind::kShape,
                "[dtensor.visualize_sharding] visualize sharding supports only 1D or 2D DTensor, found shape [{}].",
                fmt::join(tensor.sizes(), ", "));
  const DeviceMesh& mesh = *impl.mesh();
  std::string text = fmt::format("shape [{}], {} on {}\n", fmt::join(tensor.sizes(), ", "),
                                 to_string(impl.placements()), mesh.to_string());
  if (tensor.numel() == 0) return text;
  const Cuts cuts = cuts_of(mesh, impl.placements());
  std::vector<Runs> rows;
  std::vector<Runs> columns;
  for (int64_t position = 0; position < mesh.size(); ++position) {
    const auto coordinate = coordinate_at(mesh, position);
    rows.push_back(runs_of(tensor.size(0), 0, mesh, cuts, coordinate));
    columns.push_back(tensor.dim() == 2 ? runs_of(tensor.size(1), 1, mesh, cuts, coordinate) : Runs{{0, 1}});
  }
  const auto row_ranges = ranges_of(tensor.size(0), rows);
  const auto column_ranges = ranges_of(tensor.dim() == 2 ? tensor.size(1) : 1, columns);
  std::vector<std::vector<std::string>> cells(1 + row_ranges.size());
  cells[0].push_back("");
  for (const Run& range : column_ranges) cells[0].push_back(tensor.dim() == 2 ? "col " + text_of(range) : "");
  for (size_t i = 0; i < row_ranges.size(); ++i) {
    cells[i + 1].push_back("row " + text_of(row_ranges[i]));
    for (const Run& column : column_ranges) {
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
