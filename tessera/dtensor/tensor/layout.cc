// Computes which elements of a global tensor a rank holds, and their strides in the local tensor.
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

// The dim consists of n / piece full pieces and a smaller last piece. The rank holds one chunk of each piece; the
// result is the sum of the sizes of these chunks.
int64_t local_shard_size(int64_t n, int64_t k, int64_t coordinate, int64_t pieces) {
  const int64_t piece = (n + pieces - 1) / pieces;  // the dim is divided into pieces as by torch.chunk
  if (piece == 0) return 0;
  return n / piece * local_range(piece, k, coordinate).size + local_range(n % piece, k, coordinate).size;
}

bool is_inside_later_shards(const DeviceMesh& mesh, const Placements& placements, size_t i) {
  if (!placements[i].is_strided_shard()) return false;
  int64_t later = 1;
  bool any = false;
  for (size_t j = i + 1; j < placements.size(); ++j) {
    if (placements[j].is_any_shard() && placements[j].dim == placements[i].dim) {
      if (placements[j].is_strided_shard() && !is_inside_later_shards(mesh, placements, j)) return false;
      later *= mesh.shape()[j];
      any = true;
    }
  }
  return any && later == placements[i].split_factor;
}

// A shard inside later shards (is_inside_later_shards) divides the chunks that the shards of the later mesh dims give
// each rank, so it becomes an ordinary split after theirs. Of several such shards the one on the first mesh dim is
// innermost, so each new one is inserted at the front of `last`.
ShardSplits shard_splits_of(const DeviceMesh& mesh, const Placements& placements) {
  ShardSplits splits;
  ShardSplits last;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_any_shard()) continue;
    if (is_inside_later_shards(mesh, placements, i)) {
      last.insert(last.begin(), {static_cast<int64_t>(i), placements[i].dim, 1});
    } else {
      splits.push_back({static_cast<int64_t>(i), placements[i].dim, placements[i].split_factor});
    }
  }
  splits.append(last.begin(), last.end());
  return splits;
}

std::vector<int64_t> coordinate_at(const DeviceMesh& mesh, int64_t position) {
  std::vector<int64_t> coordinate(mesh.shape().size());
  for (size_t dim = coordinate.size(); dim-- > 0;) {
    coordinate[dim] = position % mesh.shape()[dim];
    position /= mesh.shape()[dim];
  }
  return coordinate;
}

int64_t length(const IndexSpans& spans) {
  int64_t total = 0;
  for (const IndexSpan& span : spans) total += span.size;
  return total;
}

namespace {

// Appends to `to` the indices at the positions [offset, offset + size) of the list `from`. Adjacent spans are merged.
void append_part(const IndexSpans& from, int64_t offset, int64_t size, IndexSpans& to) {
  for (const IndexSpan& span : from) {
    const int64_t skipped = std::min(offset, span.size);
    const int64_t taken = std::min(size, span.size - skipped);
    offset -= skipped;
    if (taken > 0) {
      const int64_t start = span.start + skipped;
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

IndexSpans shard_index_spans(const IndexSpans& whole, int64_t k, int64_t i, int32_t pieces) {
  const int64_t n = length(whole);
  const int64_t piece = std::max<int64_t>((n + pieces - 1) / pieces, 1);
  IndexSpans part;
  for (int64_t start = 0; start < n; start += piece) {
    const LocalRange range = local_range(std::min(piece, n - start), k, i);
    append_part(whole, start + range.offset, range.size, part);
  }
  return part;
}

// Applies the splits from the outermost to the innermost. Each split divides the indices that the rank holds after the
// splits before.
IndexSpans local_index_spans(int64_t n, int64_t dim, const DeviceMesh& mesh, const ShardSplits& splits,
                             c10::IntArrayRef coordinate) {
  IndexSpans spans;
  if (n > 0) spans.push_back({0, n});
  for (const ShardSplit& split : splits) {
    if (split.dim == dim) {
      spans = shard_index_spans(spans, mesh.shape()[split.mesh_dim], coordinate[split.mesh_dim], split.pieces);
    }
  }
  return spans;
}

Sizes local_sizes(c10::IntArrayRef global, const DeviceMesh& mesh, const Placements& placements) {
  Sizes sizes(global.begin(), global.end());
  if (!mesh.coordinate()) return Sizes(global.size(), 0);
  for (const ShardSplit& split : shard_splits_of(mesh, placements)) {
    int64_t& extent = sizes[split.dim];
    extent = local_shard_size(extent, mesh.shape()[split.mesh_dim], (*mesh.coordinate())[split.mesh_dim], split.pieces);
  }
  return sizes;
}

Sizes dense_strides(c10::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return Sizes(strides.begin(), strides.end());
}

// Sorts the dims by the strides `like`, largest first, and gives them dense strides in this order. Dims with equal
// strides keep their order.
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

Sizes gathered_copy_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] == 0) return dense_strides(sizes);
  }
  return strides_in_order(sizes, strides);
}

// For a tensor without elements all strides describe the same layout.
bool has_same_layout(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::IntArrayRef other_strides) {
  bool same = true;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    same = same && (sizes[i] == 1 || strides[i] == other_strides[i]);
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
  TESSERA_CHECK(are_partials_compatible(placements), ErrorKind::kShape,
                "[dtensor.{}] placements {}: found different reductions on one tensor, wanted one reduction (or sums "
                "and averages). Redistribute the tensor first.",
                verb, to_string(placements));
}

bool can_combine_partials(const Placement& a, const Placement& b) {
  const auto additive = [](const Placement& p) { return p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg); };
  return a == b || (additive(a) && additive(b));
}

bool are_partials_compatible(const Placements& placements) {
  const Placement* last = nullptr;
  for (const auto& placement : placements) {
    if (!placement.is_partial()) continue;
    if (last != nullptr && !can_combine_partials(*last, placement)) return false;
    last = &placement;
  }
  return true;
}

// An empty shard starts at the end of its dim; a dim of size 0 that is not sharded starts at 0.
LocalBox local_box(const std::vector<int64_t>& global_shape, const DeviceMesh& mesh, const Placements& placements) {
  Placements checked = placements;
  check_placements("local_box", mesh, checked, static_cast<int64_t>(global_shape.size()));
  LocalBox box{global_shape, std::vector<int64_t>(global_shape.size(), 0)};
  TESSERA_CHECK(mesh.coordinate().has_value(), ErrorKind::kShape,
                "[dtensor.local_box] {}: rank {} is not part of the mesh.", mesh.to_string(), mesh.rank());
  const ShardSplits splits = shard_splits_of(mesh, checked);
  for (size_t dim = 0; dim < box.shape.size(); ++dim) {
    const IndexSpans spans =
        local_index_spans(global_shape[dim], static_cast<int64_t>(dim), mesh, splits, *mesh.coordinate());
    const bool is_sharded =
        std::ranges::any_of(splits, [&](const auto& split) { return split.dim == static_cast<int64_t>(dim); });
    box.shape[dim] = length(spans);
    box.offset[dim] = !spans.empty() ? spans[0].start : is_sharded ? global_shape[dim] : 0;
  }
  return box;
}

}  // namespace tessera
