// New DTensors of a global shape: each rank makes its own part. No communication (but see random.h for the first rand
// or randn without manual_seed).
//
//   at::Tensor w = dtensor::zeros({1024, 512}, mesh, {Shard(0)}, {.dtype = at::kBFloat16});
//
// Names and defaults of torch.distributed.tensor's factories; placements default to Replicate. With Partial the values
// are those of the reduced tensor: ones with P(sum) hold the ones on the first rank of the mesh dim and zeros on the
// others (upstream fills every rank, so that full_tensor() gives a multiple).
#pragma once

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::dtensor {

struct FactoryOptions {
  std::optional<c10::ScalarType> dtype = std::nullopt;  // default: libtorch's default dtype (full: the value's kind)
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
// Uniform in [0, 1), normal; the values do not depend on mesh or placements.
at::Tensor rand(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements = {},
                const FactoryOptions& options = {});
at::Tensor randn(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements = {},
                 const FactoryOptions& options = {});
// Integers from low to high - 1; int64 unless a dtype is given.
at::Tensor randint(int64_t low, int64_t high, const std::vector<int64_t>& size, const MeshPtr& mesh,
                   Placements placements = {}, const FactoryOptions& options = {});

}  // namespace tessera::dtensor
