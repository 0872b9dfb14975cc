// The step of Muon: the nearest matrix with orthogonal rows or columns, nearly.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::optim::detail {

struct NewtonSchulz {
  std::vector<double> coefficients;  // three
  int64_t steps = 5;
  double eps = 1e-7;
};

// Of a bfloat16 matrix, in bfloat16: its singular values brought near 1 by `steps` steps of a quintic iteration. The
// operations of torch.optim.Muon, in their order. `matrix` is overwritten.
at::Tensor orthogonalize(const at::Tensor& matrix, const NewtonSchulz& how);

// The same of several matrices, which may be DTensors, each result laid as its matrix: every rank of a mesh computes
// some of them. COLLECTIVE over the meshes of DTensors. `give` gets the position and this rank's part of the result.
void orthogonalize_all(const std::vector<at::Tensor>& matrices, const NewtonSchulz& how,
                       const std::function<void(size_t, const at::Tensor&)>& give);

}  // namespace tessera::optim::detail
