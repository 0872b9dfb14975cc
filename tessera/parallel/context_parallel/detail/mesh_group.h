// The group of a mesh over which tokens lie. Internal to context parallelism.
//
//   detail::check_context_mesh("context_parallel_unshard", mesh);
//   const nn::ContextParallelism how = detail::context_over(mesh, nn::RotateMethod::kAllGather);
#pragma once

#include "tessera/base/error.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/attention/context_attention.h"

namespace tessera::detail {

// Error kShape unless it is a mesh of one dim with this rank in it. No communication.
inline void check_context_mesh(const char* verb, const MeshPtr& mesh) {
  TESSERA_CHECK(
      mesh != nullptr && mesh->ndim() == 1 && mesh->coordinate().has_value(), ErrorKind::kShape,
      "[parallel.{}] found {}, wanted a mesh of one dim that holds this rank. Slice it: mesh->slice({{\"cp\"}}).", verb,
      mesh == nullptr ? "no mesh" : mesh->to_string());
}

// COLLECTIVE over the mesh at the first use of its group.
inline nn::ContextParallelism context_over(const MeshPtr& mesh, nn::RotateMethod rotate) {
  return {.group = mesh->group(0), .rotate = rotate};
}

}  // namespace tessera::detail
