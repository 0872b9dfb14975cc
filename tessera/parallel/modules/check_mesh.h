// The check of meshes over which a whole module is made parallel.
#pragma once

#include "tessera/base/error.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Error kShape, named [where], unless it is a mesh of one dim with this rank in it; `dim`: what such a dim is called.
// No communication.
inline void check_one_dim_mesh(const MeshPtr& mesh, const char* where, const char* dim) {
  TESSERA_CHECK(mesh != nullptr && mesh->ndim() == 1 && mesh->coordinate().has_value(), ErrorKind::kShape,
                "[{}] found {}, wanted a 1-d mesh that holds this rank. Make one with init_device_mesh, or slice one: "
                "mesh->slice({{\"{}\"}}).",
                where, mesh == nullptr ? "no mesh" : mesh->to_string(), dim);
}

}  // namespace tessera
