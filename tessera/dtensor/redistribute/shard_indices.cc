#include "tessera/dtensor/redistribute/shard_indices.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tessera {

namespace {

// Returns the coordinates of the ranks in this rank's group over the mesh dims `dims`, in group order. On the other
// mesh dims they have this rank's coordinate.
std::vector<Coordinate> members(const DeviceMesh& mesh, const MeshDims& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= mesh.shape()[dim];
  std::vector<Coordinate> all(count, Coordinate(mesh.coordinate()->begin(), mesh.coordinate()->end()));
  for (int64_t i = 0; i < count; ++i) {
    int64_t remaining_index = i;
    for (size_t d = dims.size(); d-- > 0;) {
      all[i][dims[d]] = remaining_index % mesh.shape()[dims[d]];
      remaining_index /= mesh.shape()[dims[d]];
    }
  }
  return all;
}

ShardIndices part_of(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const ShardSplits& splits,
                     const Coordinate& coordinate) {
  ShardIndices part;
  for (size_t dim = 0; dim < global_sizes.size(); ++dim) {
    part.push_back(local_index_spans(global_sizes[dim], static_cast<int64_t>(dim), mesh, splits, coordinate));
  }
  return part;
}

// Returns where the global indices `inner` are along this dim of the local tensor of a rank that holds the indices
// `outer`. All indices of `inner` are in `outer`, and both lists are ascending, so one pass over both is enough.
IndexSpans positions(const IndexSpans& outer, const IndexSpans& inner) {
  IndexSpans found;
  int64_t before = 0;
  auto next = inner.begin();
  for (const IndexSpan& span : outer) {
    while (next != inner.end() && next->start < span.start + span.size) {
      const int64_t at = before + next->start - span.start;
      if (!found.empty() && found.back().start + found.back().size == at) {
        found.back().size += next->size;
      } else {
        found.push_back({at, next->size});
      }
      ++next;
    }
    before += span.size;
  }
  return found;
}

// `tensor` holds the part `held` of a whole tensor, and `values` holds the part `values_part` of the same whole tensor.
// Copies `values` to the positions of `values_part` in `tensor`; on the dims before `dim` both tensors are narrowed
// already. Along a dim the positions may form several ranges. The function calls itself with the next dim for each
// range of dim `dim`, so every combination of ranges is copied.
void copy_part_into(const at::Tensor& tensor, const ShardIndices& held, const at::Tensor& values,
                    const ShardIndices& values_part, size_t dim) {
  if (dim == held.size()) {
    tensor.copy_(values);
    return;
  }
  const auto d = static_cast<int64_t>(dim);
  int64_t taken = 0;
  for (const IndexSpan& place : positions(held[dim], values_part[dim])) {
    copy_part_into(tensor.narrow(d, place.start, place.size), held, values.narrow(d, taken, place.size), values_part,
                   dim + 1);
    taken += place.size;
  }
}

}  // namespace

TransferPlan compute_transfer(const TransferRequest& request, const DeviceMesh& mesh) {
  const c10::IntArrayRef sizes = request.global_sizes;
  const MeshDims& mesh_dims = request.mesh_dims;
  const ShardSplits& from = request.from;
  const Coordinate self(mesh.coordinate()->begin(), mesh.coordinate()->end());
  TransferPlan transfer{part_of(sizes, mesh, from, self), part_of(sizes, mesh, request.to, self), {}, {}, {}};
  if (!request.needs_parts_before && !request.needs_parts_after) return transfer;
  for (const Coordinate& member : members(mesh, mesh_dims)) {
    if (request.needs_parts_before) transfer.parts_before.push_back(part_of(sizes, mesh, from, member));
    if (request.needs_parts_after) transfer.parts_after.push_back(part_of(sizes, mesh, request.to, member));
    // An element that several ranks hold is sent to a receiver by one of them only: by the rank that has the receiver's
    // coordinates on all mesh dims that do not shard the tensor before the step. If the receiver itself holds the
    // element, it takes the element from its own tensor.
    bool linked = true;
    for (const int64_t dim : mesh_dims) {
      const bool is_split = std::ranges::any_of(from, [dim](const ShardSplit& split) { return split.mesh_dim == dim; });
      linked = linked && (self[dim] == member[dim] || is_split);
    }
    transfer.exchanges_with.push_back(linked);
  }
  return transfer;
}

Sizes sizes_of(const ShardIndices& part) {
  Sizes sizes;
  for (const IndexSpans& spans : part) sizes.push_back(length(spans));
  return sizes;
}

int64_t numel_of(const ShardIndices& part) { return c10::multiply_integers(sizes_of(part)); }

// The spans of `a` and `b` are ascending in each dim, so one pass over both finds the common spans in ascending order.
ShardIndices intersection(const ShardIndices& a, const ShardIndices& b) {
  ShardIndices both;
  for (size_t dim = 0; dim < a.size(); ++dim) {
    IndexSpans spans;
    for (size_t i = 0, j = 0; i < a[dim].size() && j < b[dim].size();) {
      const IndexSpan& x = a[dim][i];
      const IndexSpan& y = b[dim][j];
      const int64_t start = std::max(x.start, y.start);
      const int64_t end = std::min(x.start + x.size, y.start + y.size);
      if (start < end) spans.push_back({start, end - start});
      (x.start + x.size < y.start + y.size ? i : j) += 1;
    }
    both.push_back(std::move(spans));
  }
  return both;
}

at::Tensor slice_part(const at::Tensor& tensor, const ShardIndices& held, const ShardIndices& needed) {
  at::Tensor taken = tensor;
  for (size_t dim = 0; dim < held.size(); ++dim) {
    if (held[dim] == needed[dim]) continue;
    const IndexSpans places = positions(held[dim], needed[dim]);
    const auto d = static_cast<int64_t>(dim);
    if (places.empty()) {
      taken = taken.narrow(d, 0, 0);
    } else if (places.size() == 1) {
      taken = taken.narrow(d, places[0].start, places[0].size);
    } else {
      std::vector<at::Tensor> pieces;
      for (const IndexSpan& place : places) pieces.push_back(taken.narrow(d, place.start, place.size));
      taken = at::cat(pieces, d);
    }
  }
  return taken;
}

void copy_part_into(const at::Tensor& tensor, const ShardIndices& held, const at::Tensor& values,
                    const ShardIndices& values_part) {
  copy_part_into(tensor, held, values, values_part, 0);
}

// Returns the dim along which the concatenation of `parts` gives `whole`, or nullopt if there is none. The parts must
// equal `whole` in all other dims. In this dim each part must be one range, or empty, and must start where the previous
// part ends.
std::optional<int64_t> concat_dim(const ShardIndices& whole, const std::vector<ShardIndices>& parts) {
  const auto is_divided = [&](size_t dim) {
    return std::ranges::any_of(parts, [&](const ShardIndices& part) { return part[dim] != whole[dim]; });
  };
  size_t divided = 0;
  while (divided < whole.size() && !is_divided(divided)) ++divided;
  if (divided == whole.size()) return std::nullopt;
  for (size_t dim = divided + 1; dim < whole.size(); ++dim) {
    if (is_divided(dim)) return std::nullopt;
  }
  int64_t next = 0;
  for (const ShardIndices& part : parts) {
    const IndexSpans places = positions(whole[divided], part[divided]);
    if (places.size() > 1 || (places.size() == 1 && places[0].start != next)) return std::nullopt;
    next += length(part[divided]);
  }
  return next == length(whole[divided]) ? std::optional(static_cast<int64_t>(divided)) : std::nullopt;
}

// Returns true for one part that is equal to `whole`. For several parts, returns true only if concat_dim() finds the
// dim along which they are concatenated, and `whole` has size 1 in all dims before this dim. With a larger size in such
// a dim, the elements of the parts would alternate in memory.
bool is_contiguous_concat(const ShardIndices& whole, const std::vector<ShardIndices>& parts) {
  if (whole.empty()) return parts.size() == 1;
  if (parts.size() == 1 && parts[0] == whole) return true;
  const auto dim = concat_dim(whole, parts);
  return dim &&
         std::all_of(whole.begin(), whole.begin() + *dim, [](const IndexSpans& spans) { return length(spans) == 1; });
}

}  // namespace tessera
