// Functions that create DTensors from a global shape. Each rank makes its own local tensor. No communication, except
// that the first random operation on a mesh without manual_seed broadcasts a seed (random/random.h).
//
//   at::Tensor w = dtensor::zeros({1024, 512}, mesh, {Shard(0)}, {.dtype = at::kBFloat16});
//
// Names and defaults are those of torch.distributed.tensor's factories; the default placement is Replicate. With
// Partial the reduced tensor has the requested values: ones() with P(sum) makes ones on the first rank of the mesh dim
// and zeros on the others. PyTorch fills every rank with ones, so that full_tensor() gives the number of ranks.
#pragma once

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::dtensor {

struct FactoryOptions {
  // Unset: libtorch's default dtype. For full() bool, int64 or the complex form of the default dtype if the value is
  // boolean, integral or complex.
  std::optional<c10::ScalarType> dtype = std::nullopt;
  bool requires_grad = false;
};

at::Tensor empty(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements = {},
                 const FactoryOptions& options = {});
at::Tensor zeros(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements = {},
                 const FactoryOptions& options = {});
at::Tensor ones(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements = {},
                const FactoryOptions& options = {});
at::Tensor full(const std::vector<int64_t>& size, const c10::Scalar& value, const MeshPtr& mesh,
                Placements placements = {}, const FactoryOptions& options = {});
// rand is uniform in [0, 1), randn is normal with mean 0 and standard deviation 1. The values do not depend on the mesh
// or the placements.
at::Tensor rand(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements = {},
                const FactoryOptions& options = {});
at::Tensor randn(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements = {},
                 const FactoryOptions& options = {});
// Integers from low to high - 1. The dtype is int64 unless options.dtype is set.
at::Tensor randint(int64_t low, int64_t high, const std::vector<int64_t>& size, const MeshPtr& mesh,
                   Placements placements = {}, const FactoryOptions& options = {});

}  // namespace tessera::dtensor
