// Parts of a tensor, as global indices, and copies between tensors that hold different parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

using MeshDims = c10::SmallVector<int64_t, 2>;
using Coordinate = c10::SmallVector<int64_t, 4>;
using Part = c10::SmallVector<Runs, 6>;  // for each tensor dim: the global indices of the part

// The parts that ranks hold before and after a step.
struct Movement {
  Part held;    // part of this rank before the step
  Part wanted;  // part of this rank after the step
  // Parts of the members of the step's group, in group order; empty unless requested.
  std::vector<Part> before;
  std::vector<Part> after;
  std::vector<bool> linked;  // for each member: whether this rank exchanges elements with it
};
// A change from one list of cuts to another over the group of these mesh dims, seen from a rank of the mesh.
struct Division {
  c10::IntArrayRef global_sizes;
  const MeshDims& mesh_dims;
  const Cuts& from;
  const Cuts& to;
  bool before;  // compute Movement::before
  bool after;   // compute Movement::after
};
Movement movement_of(const Division& division, const DeviceMesh& mesh);

Sizes sizes_of(const Part& part);
int64_t numel_of(const Part& part);
// The elements that are in both parts.
Part common(const Part& a, const Part& b);
// The elements of part `wanted` from a tensor that holds part `held`. The result is a view if the elements are
// contiguous ranges.
at::Tensor take(const at::Tensor& tensor, const Part& held, const Part& wanted);
// Writes `values`, which hold part `given`, to their positions in a tensor that holds part `held`.
void put(const at::Tensor& tensor, const Part& held, const at::Tensor& values, const Part& given);
// The dim along which the concatenation of the parts is the whole; nullopt when there is none.
std::optional<int64_t> dim_that_joins(const Part& whole, const std::vector<Part>& parts);
// Whether the parts, one after the other, are the contiguous memory of the whole.
bool in_order(const Part& whole, const std::vector<Part>& parts);

}  // namespace tessera
