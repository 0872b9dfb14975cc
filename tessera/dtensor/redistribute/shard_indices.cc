#include "tessera/dtensor/redistribute/shard_indices.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace tessera {

namespace {

// Coordinates of the ranks in the group over some mesh dims, in group order. Other coordinates are those of this rank.
std::vector<Coordinate> members(const DeviceMesh& mesh, const MeshDims& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= mesh.shape()[dim];
  std::vector<Coordinate> all(count, Coordinate(mesh.coordinate()->begin(), mesh.coordinate()->end()));
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    for (size_t d = dims.size(); d-- > 0;) {
      all[i][dims[d]] = rest % mesh.shape()[dims[d]];
      rest /= mesh.shape()[dims[d]];
    }
  }
  return all;
}

Part part_of(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Cuts& cuts, const Coordinate& coordinate) {
  Part part;
  for (size_t dim = 0; dim < global_sizes.size(); ++dim) {
    part.push_back(runs_of(global_sizes[dim], static_cast<int64_t>(dim), mesh, cuts, coordinate));
  }
  return part;
}

// Positions, in the memory of a rank that holds `outer`, of the elements `inner`. All elements of `inner` are in
// `outer`, and both lists are in ascending order, so one pass over both is enough.
Runs positions(const Runs& outer, const Runs& inner) {
  Runs found;
  int64_t before = 0;
  auto next = inner.begin();
  for (const Run& run : outer) {
    while (next != inner.end() && next->start < run.start + run.size) {
      const int64_t at = before + next->start - run.start;
      if (!found.empty() && found.back().start + found.back().size == at) {
        found.back().size += next->size;
      } else {
        found.push_back({at, next->size});
      }
      ++next;
    }
    before += run.size;
  }
  return found;
}

// Copies dim by dim. Each dim may consist of several ranges, so the recursion handles every combination of ranges.
void put(const at::Tensor& tensor, const Part& held, const at::Tensor& values, const Part& given, size_t dim) {
  if (dim == held.size()) {
    tensor.copy_(values);
    return;
  }
  const auto d = static_cast<int64_t>(dim);
  int64_t taken = 0;
  for (const Run& place : positions(held[dim], given[dim])) {
    put(tensor.narrow(d, place.start, place.size), held, values.narrow(d, taken, place.size), given, dim + 1);
    taken += place.size;
  }
}

}  // namespace

Movement movement_of(const Division& division, const DeviceMesh& mesh) {
  const c10::IntArrayRef sizes = division.global_sizes;
  const MeshDims& mesh_dims = division.mesh_dims;
  const Cuts& from = division.from;
  const Coordinate self(mesh.coordinate()->begin(), mesh.coordinate()->end());
  Movement movement{part_of(sizes, mesh, from, self), part_of(sizes, mesh, division.to, self), {}, {}, {}};
  if (!division.before && !division.after) return movement;
  for (const Coordinate& member : members(mesh, mesh_dims)) {
    if (division.before) movement.before.push_back(part_of(sizes, mesh, from, member));
    if (division.after) movement.after.push_back(part_of(sizes, mesh, division.to, member));
    // An element that several ranks hold is sent by one of them only: by the rank with the same coordinates as the
    // receiver on all mesh dims that do not cut the tensor before the step. If the receiver has the element, this is
    // the receiver itself.
    bool linked = true;
    for (const int64_t dim : mesh_dims) {
      const bool cuts = std::ranges::any_of(from, [dim](const Cut& cut) { return cut.mesh_dim == dim; });
      linked = linked && (self[dim] == member[dim] || cuts);
    }
    movement.linked.push_back(linked);
  }
  return movement;
}

Sizes sizes_of(const Part& part) {
  Sizes sizes;
  for (const Runs& runs : part) sizes.push_back(length(runs));
  return sizes;
}

int64_t numel_of(const Part& part) { return c10::multiply_integers(sizes_of(part)); }

// Runs are ascending, so one pass gives the common runs in ascending order.
Part common(const Part& a, const Part& b) {
  Part both;
  for (size_t dim = 0; dim < a.size(); ++dim) {
    Runs runs;
    for (size_t i = 0, j = 0; i < a[dim].size() && j < b[dim].size();) {
      const Run& x = a[dim][i];
      const Run& y = b[dim][j];
      const int64_t start = std::max(x.start, y.start);
      const int64_t end = std::min(x.start + x.size, y.start + y.size);
      if (start < end) runs.push_back({start, end - start});
      (x.start + x.size < y.start + y.size ? i : j) += 1;
    }
    both.push_back(std::move(runs));
  }
  return both;
}

at::Tensor take(const at::Tensor& tensor, const Part& held, const Part& wanted) {
  at::Tensor taken = tensor;
  for (size_t dim = 0; dim < held.size(); ++dim) {
    if (held[dim] == wanted[dim]) continue;
    const Runs places = positions(held[dim], wanted[dim]);
    const auto d = static_cast<int64_t>(dim);
    if (places.empty()) {
      taken = taken.narrow(d, 0, 0);
    } else if (places.size() == 1) {
      taken = taken.narrow(d, places[0].start, places[0].size);
    } else {
      std::vector<at::Tensor> pieces;
      for (const Run& place : places) pieces.push_back(taken.narrow(d, place.start, place.size));
      taken = at::cat(pieces, d);
    }
  }
  return taken;
}

void put(const at::Tensor& tensor, const Part& held, const at::Tensor& values, const Part& given) {
  put(tensor, held, values, given, 0);
}

// Exactly one dim may be divided, and along it each part must be one range that starts where the previous part ends.
std::optional<int64_t> dim_that_joins(const Part& whole, const std::vector<Part>& parts) {
  const auto is_cut = [&](size_t dim) {
    return std::ranges::any_of(parts, [&](const Part& part) { return part[dim] != whole[dim]; });
  };
  size_t cut = 0;
  while (cut < whole.size() && !is_cut(cut)) ++cut;
  if (cut == whole.size()) return std::nullopt;
  for (size_t dim = cut + 1; dim < whole.size(); ++dim) {
    if (is_cut(dim)) return std::nullopt;
  }
  int64_t next = 0;
  for (const Part& part : parts) {
    const Runs places = positions(whole[cut], part[cut]);
    if (places.size() > 1 || (places.size() == 1 && places[0].start != next)) return std::nullopt;
    next += length(part[cut]);
  }
  return next == length(whole[cut]) ? std::optional(static_cast<int64_t>(cut)) : std::nullopt;
}

// The parts must be divided along one dim, and all dims before it must have one element.
bool in_order(const Part& whole, const std::vector<Part>& parts) {
  if (whole.empty()) return parts.size() == 1;
  if (parts.size() == 1 && parts[0] == whole) return true;
  const auto cut = dim_that_joins(whole, parts);
  return cut && std::all_of(whole.begin(), whole.begin() + *cut, [](const Runs& runs) { return length(runs) == 1; });
}

}  // namespace tessera
