// Computes which part of a tensor a rank holds.
#include "tessera/dtensor/tensor/layout.h"

#include <c10/util/strides.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

LocalRange local_range(int64_t n, int64_t k, int64_t coordinate) {
  const int64_t chunk = (n + k - 1) / k;
  const int64_t offset = std::min(n, chunk * coordinate);
  return {std::min(n, chunk * (coordinate + 1)) - offset, offset};
}

// The dim consists of n / piece full pieces and a smaller last one. This rank's extent is the sum of its chunks of all
// pieces.
int64_t local_extent(int64_t n, int64_t k, int64_t coordinate, int64_t pieces) {
  const int64_t piece = (n + pieces - 1) / pieces;  // pieces are divided as by torch.chunk, too
  if (piece == 0) return 0;
  return n / piece * local_range(piece, k, coordinate).size + local_range(n % piece, k, coordinate).size;
}

bool is_nested_last(const DeviceMesh& mesh, const Placements& placements, size_t i) {
  if (!placements[i].is_strided_shard()) return false;
  int64_t later = 1;
  bool any = false;
  for (size_t j = i + 1; j < placements.size(); ++j) {
    if (placements[j].is_any_shard() && placements[j].dim == placements[i].dim) {
      if (placements[j].is_strided_shard() && !is_nested_last(mesh, placements, j)) return false;
      later *= mesh.shape()[j];
      any = true;
    }
  }
  return any && later == placements[i].split_factor;
}

// A shard that is nested last divides what the shards of later mesh dims leave, so it becomes an ordinary cut behind
// them. Of several such shards that of the first mesh dim is innermost; hence the insertion at the front.
Cuts cuts_of(const DeviceMesh& mesh, const Placements& placements) {
  Cuts cuts;
  Cuts last;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_any_shard()) continue;
    if (is_nested_last(mesh, placements, i)) {
      last.insert(last.begin(), {static_cast<int64_t>(i), placements[i].dim, 1});
    } else {
      cuts.push_back({static_cast<int64_t>(i), placements[i].dim, placements[i].split_factor});
    }
  }
  cuts.append(last.begin(), last.end());
  return cuts;
}

std::vector<int64_t> coordinate_at(const DeviceMesh& mesh, int64_t position) {
  std::vector<int64_t> coordinate(mesh.shape().size());
  for (size_t dim = coordinate.size(); dim-- > 0;) {
    coordinate[dim] = position % mesh.shape()[dim];
    position /= mesh.shape()[dim];
  }
  return coordinate;
}

int64_t length(const Runs& runs) {
  int64_t total = 0;
  for (const Run& run : runs) total += run.size;
  return total;
}

namespace {

// Appends the elements at positions offset ... offset + size - 1 of `from`, joining adjacent runs.
void append_part(const Runs& from, int64_t offset, int64_t size, Runs& to) {
  for (const Run& run : from) {
    const int64_t skipped = std::min(offset, run.size);
    const int64_t taken = std::min(size, run.size - skipped);
    offset -= skipped;
    if (taken > 0) {
      const int64_t start = run.start + skipped;
      if (!to.empty() && to.back().start + to.back().size == start) {
        to.back().size += taken;
      } else {
        to.push_back({start, taken});
      }
      size -= taken;
    }
  }
}

}  // namespace

Runs part_of_cut(const Runs& whole, int64_t k, int64_t i, int32_t pieces) {
  const int64_t n = length(whole);
  const int64_t piece = std::max<int64_t>((n + pieces - 1) / pieces, 1);
  Runs part;
  for (int64_t start = 0; start < n; start += piece) {
    const LocalRange range = local_range(std::min(piece, n - start), k, i);
    append_part(whole, start + range.offset, range.size, part);
  }
  return part;
}

// Cuts apply from the outermost to the innermost: each one divides the elements that the cuts before it left to this
// rank.
Runs runs_of(int64_t n, int64_t dim, const DeviceMesh& mesh, const Cuts& cuts, c10::IntArrayRef coordinate) {
  Runs runs;
  if (n > 0) runs.push_back({0, n});
  for (const Cut& cut : cuts) {
    if (cut.dim == dim) runs = part_of_cut(runs, mesh.shape()[cut.mesh_dim], coordinate[cut.mesh_dim], cut.pieces);
  }
  return runs;
}

Sizes local_sizes(c10::IntArrayRef global, const DeviceMesh& mesh, const Placements& placements) {
  Sizes sizes(global.begin(), global.end());
  if (!mesh.coordinate()) return Sizes(global.size(), 0);
  for (const Cut& cut : cuts_of(mesh, placements)) {
    int64_t& extent = sizes[cut.dim];
    extent = local_extent(extent, mesh.shape()[cut.mesh_dim], (*mesh.coordinate())[cut.mesh_dim], cut.pieces);
  }
  return sizes;
}

Sizes dense_strides(c10::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return Sizes(strides.begin(), strides.end());
}

// Sorts the dims by the strides of `like`, largest first, and gives them dense strides in this order. Equal strides
// keep the order of the dims.
Sizes strides_in_order(c10::IntArrayRef sizes, c10::IntArrayRef like) {
  c10::SmallVector<size_t, 6> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return like[a] > like[b]; });
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

Sizes strides_of_gathered(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] == 0) return dense_strides(sizes);
  }
  return strides_in_order(sizes, strides);
}

// A tensor without elements has every layout.
bool lies_as(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef wanted) {
  bool same = true;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    same = same && (sizes[i] == 1 || strides[i] == wanted[i]);
  }
  return same;
}

void check_placements(const char* verb, const DeviceMesh& mesh, Placements& placements, int64_t ndim) {
  TESSERA_CHECK(
      static_cast<int64_t>(placements.size()) == mesh.ndim(), ErrorKind::kShape,
      "[dtensor.{}] placements {}: found {}, wanted {}, one for each dim of {}. Give one placement for each mesh dim.",
      verb, to_string(placements), placements.size(), mesh.ndim(), mesh.to_string());
  for (auto& placement : placements) {
    if (placement.is_any_shard()) {
      TESSERA_CHECK(placement.dim >= -ndim && placement.dim < ndim, ErrorKind::kShape,
                    "[dtensor.{}] placements {}: found sharded dim {}, wanted less than the tensor's {} dims.", verb,
                    to_string(placements), placement.dim, ndim);
      if (placement.dim < 0) placement.dim += static_cast<int32_t>(ndim);
      TESSERA_CHECK(placement.split_factor >= 1, ErrorKind::kShape,
                    "[dtensor.{}] placements {}: found split factor {}, wanted 1 or more.", verb, to_string(placements),
                    placement.split_factor);
    }
  }
  TESSERA_CHECK(partials_go_together(placements), ErrorKind::kShape,
                "[dtensor.{}] placements {}: found different reductions on one tensor, wanted one reduction (or sums "
                "and averages). Redistribute the tensor first.",
                verb, to_string(placements));
}

bool can_mix(const Placement& a, const Placement& b) {
  const auto additive = [](const Placement& p) { return p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg); };
  return a == b || (additive(a) && additive(b));
}

bool partials_go_together(const Placements& placements) {
  const Placement* last = nullptr;
  for (const auto& placement : placements) {
    if (!placement.is_partial()) continue;
    if (last != nullptr && !can_mix(*last, placement)) return false;
    last = &placement;
  }
  return true;
}

// An empty shard starts at the end of its dim; a dim of size 0 that is not cut starts at 0.
LocalBox local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh, const Placements& placements) {
  Placements checked = placements;
  check_placements("local_box", mesh, checked, static_cast<int64_t>(global_shape.size()));
  LocalBox box{global_shape, std::vector<int64_t>(global_shape.size(), 0)};
  TESSERA_CHECK(mesh.coordinate().has_value(), ErrorKind::kShape,
                "[dtensor.local_box] {}: rank {} is not part of the mesh.", mesh.to_string(), mesh.rank());
  const Cuts cuts = cuts_of(mesh, checked);
  for (size_t dim = 0; dim < box.shape.size(); ++dim) {
    const Runs runs = runs_of(global_shape[dim], static_cast<int64_t>(dim), mesh, cuts, *mesh.coordinate());
    const bool cut = std::ranges::any_of(cuts, [&](const auto& c) { return c.dim == static_cast<int64_t>(dim); });
    box.shape[dim] = length(runs);
    box.offset[dim] = !runs.empty() ? runs[0].start : cut ? global_shape[dim] : 0;
  }
  return box;
}

}  // namespace tessera
