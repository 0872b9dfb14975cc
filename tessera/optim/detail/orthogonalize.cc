#include "tessera/optim/detail/orthogonalize.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/layout.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::optim::detail {
namespace {

// Broadcasts the tensor of the rank with the mesh coordinate `owner` to all ranks of the mesh: one broadcast along each
// mesh dim, from the last dim to the first. Along a dim, only ranks whose coordinates in all earlier dims equal the
// owner's call broadcast; the root of each such group has received the tensor before.
void broadcast_from(const std::vector<int64_t>& owner, const DeviceMesh& mesh, const at::Tensor& tensor) {
  std::vector<int64_t> own;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) own.push_back(mesh.local_rank(dim));
  for (int64_t dim = mesh.ndim(); dim-- > 0;) {
    if (mesh.size(dim) == 1 || !std::equal(own.begin(), own.begin() + dim, owner.begin())) continue;
    comm::broadcast(*mesh.group(dim), tensor, static_cast<int>(owner[static_cast<size_t>(dim)]), "Muon's matrices")
        .wait();
  }
}

// Orthogonalizes matrices [begin, end) of one mesh, at most one per rank: the i-th rank of the mesh computes matrix
// begin + i and broadcasts the result.
void orthogonalize_round(const std::vector<at::Tensor>& matrices, size_t begin, size_t end,
                         const NewtonSchulz& newton_schulz,
                         const std::function<void(size_t, const at::Tensor&)>& set_result) {
  const auto mesh = device_mesh(matrices[begin]);
  std::vector<at::Tensor> results(end - begin);
  at::Tensor mine;
  size_t mine_at = 0;
  for (size_t i = begin; i < end; ++i) {
    const auto whole = full_tensor(matrices[i]);
    if (mesh->ranks()[i - begin] != mesh->rank()) continue;
    mine = whole.is_same(matrices[i]) ? whole.clone() : whole.contiguous();
    mine_at = i - begin;
  }
  if (mine.defined()) results[mine_at] = orthogonalize(mine, newton_schulz).contiguous();
  for (size_t i = begin; i < end; ++i) {
    auto& result = results[i - begin];
    if (!result.defined()) result = at::empty(matrices[i].sizes(), matrices[i].options().dtype(at::kBFloat16));
    broadcast_from(coordinate_at(*mesh, static_cast<int64_t>(i - begin)), *mesh, result);
    set_result(i, to_local(distribute_tensor(result, mesh, placements(matrices[i]), std::nullopt)));
    result.reset();
  }
}

}  // namespace

// X is scaled to a Frobenius norm of at most 1; each step computes a X + b (X X^T) X + c (X X^T)^2 X. A tall matrix is
// transposed first, because the Gram matrix of the shorter side is smaller.
at::Tensor orthogonalize(const at::Tensor& matrix, const NewtonSchulz& newton_schulz) {
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;
  x.div_(x.norm().clamp_min(newton_schulz.eps));
  const double a = newton_schulz.coefficients[0], b = newton_schulz.coefficients[1], c = newton_schulz.coefficients[2];
  for (int64_t step = 0; step < newton_schulz.steps; ++step) {
    const at::Tensor gram = x.matmul(x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
  }
  return tall ? x.t() : x;
}

void orthogonalize_all(const std::vector<at::Tensor>& matrices, const NewtonSchulz& newton_schulz,
                       const std::function<void(size_t, const at::Tensor&)>& set_result) {
  for (size_t begin = 0; begin < matrices.size();) {
    if (!is_dtensor(matrices[begin])) {
      set_result(begin, orthogonalize(matrices[begin], newton_schulz));
      ++begin;
      continue;
    }
    const auto& mesh = device_mesh(matrices[begin]);
    size_t end = begin + 1;
    while (end < matrices.size() && end - begin < static_cast<size_t>(mesh->size()) && is_dtensor(matrices[end]) &&
           *device_mesh(matrices[end]) == *mesh) {
      ++end;
    }
    orthogonalize_round(matrices, begin, end, newton_schulz, set_result);
    begin = end;
  }
}

}  // namespace tessera::optim::detail
