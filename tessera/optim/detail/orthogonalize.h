// The orthogonalization step of Muon: approximates the nearest matrix with orthogonal rows or columns.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace tessera::optim::detail {

struct NewtonSchulz {
  std::vector<double> coefficients;  // three numbers
  int64_t steps = 5;
  double eps = 1e-7;
};

// Orthogonalizes a bfloat16 matrix in bfloat16: `steps` steps of a quintic Newton-Schulz iteration bring its singular
// values near 1. The operations are those of torch.optim.Muon, in the same order. `matrix` is overwritten.
at::Tensor orthogonalize(const at::Tensor& matrix, const NewtonSchulz& newton_schulz);

// Orthogonalizes several matrices, plain or DTensors; each result has its matrix's placements. The ranks of a mesh
// share the work: each computes some matrices. COLLECTIVE over the meshes of DTensors. set_result(index, local part of
// the result) is called for every matrix.
void orthogonalize_all(const std::vector<at::Tensor>& matrices, const NewtonSchulz& newton_schulz,
                       const std::function<void(size_t, const at::Tensor&)>& set_result);

}  // namespace tessera::optim::detail
