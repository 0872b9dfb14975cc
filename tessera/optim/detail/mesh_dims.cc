#include "tessera/optim/detail/mesh_dims.h"

#include <algorithm>

#include "tessera/comm/group/group.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera::optim::detail {

std::vector<int64_t> dims_along(const DeviceMesh& mesh, const comm::Group& group) {
  std::vector<std::vector<int64_t>> coordinates;
  for (const int rank : group.ranks()) {
    const auto at = std::ranges::find(mesh.ranks(), rank);
    if (at != mesh.ranks().end()) coordinates.push_back(coordinate_at(mesh, at - mesh.ranks().begin()));
  }
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    const auto differs = [&, own = mesh.local_rank(dim)](const auto& coordinate) {
      return coordinate[static_cast<size_t>(dim)] != own;
    };
    if (std::ranges::any_of(coordinates, differs)) dims.push_back(dim);
  }
  return dims;
}

}  // namespace tessera::optim::detail
