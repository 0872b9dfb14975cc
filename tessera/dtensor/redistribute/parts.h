// What ranks hold of a tensor, as global indices, and moving it between tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

using MeshDims = c10::SmallVector<int64_t, 2>;
using Coordinate = c10::SmallVector<int64_t, 4>;
using Part = c10::SmallVector<Runs, 6>;  // by tensor dim: the global indices that a rank holds

// Who holds what before and after a step.
struct Movement {
  Part held;    // here, before
  Part wanted;  // here, after
  // Of the members of the step's group, in its order, where asked for.
  std::vector<Part> before;
  std::vector<Part> after;
  std::vector<bool> linked;  // whether elements travel between this rank and that one in an exchange
};
// From one division to another over the group of these mesh dims, on a rank of the mesh.
struct Division {
  c10::IntArrayRef global_sizes;
  const MeshDims& mesh_dims;
  const Cuts& from;
  const Cuts& to;
  bool before;  // whether it matters what the members hold before, and after
  bool after;
};
Movement movement_of(const Division& division, const DeviceMesh& mesh);

Sizes sizes_of(const Part& part);
int64_t numel_of(const Part& part);
// What both hold.
Part common(const Part& a, const Part& b);
// The elements of `wanted` from a tensor that holds `held`: a view where they lie together.
at::Tensor take(const at::Tensor& tensor, const Part& held, const Part& wanted);
// Writes `values`, the elements of `given`, to their places in a tensor that holds `held`.
void put(const at::Tensor& tensor, const Part& held, const at::Tensor& values, const Part& given);
// The dim along which the parts, one after the other, are the whole.
std::optional<int64_t> dim_that_joins(const Part& whole, const std::vector<Part>& parts);
// Whether the parts one after the other are the contiguous memory of the whole.
bool in_order(const Part& whole, const std::vector<Part>& parts);

}  // namespace tessera
