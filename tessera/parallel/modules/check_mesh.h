// Checks the mesh over which a whole module is made parallel.
#pragma once

#include "tessera/base/error.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Error kShape unless `mesh` is 1-d and contains this rank. `where` is the operation named in the message, `dim` an
// example of a dim name. No communication.
inline void check_one_dim_mesh(const MeshPtr& mesh, const char* where, const char* dim) {
  TESSERA_CHECK(mesh != nullptr && mesh->ndim() == 1 && mesh->coordinate().has_value(), ErrorKind::kShape,
                "[{}] found {}, wanted a 1-d mesh that holds this rank. Make one with init_device_mesh, or slice one: "
                "mesh->slice({{\"{}\"}}).",
                where, mesh == nullptr ? "no mesh" : fmt::format("{} on rank {}", mesh->to_string(), mesh->rank()),
                dim);
}

}  // namespace tessera
