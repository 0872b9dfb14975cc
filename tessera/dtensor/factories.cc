#include "tessera/dtensor/factories.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/random/random_fill.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace tessera::dtensor {

namespace {

// With Partial(sum) or Partial(product) the first rank of the mesh dim holds the values and the others hold the neutral
// value: 0 for a sum, 1 for a product. Returns this rank's neutral value; nullopt if this rank holds the values.
std::optional<int> neutral_of(const char* verb, const DeviceMesh& mesh, const Placements& placements) {
  std::optional<int> neutral;
  for (size_t i = 0; i < placements.size(); ++i) {
    TESSERA_CHECK(placements[i].kind != Placement::Kind::kNormPartial, ErrorKind::kShape,
                  "[dtensor.{}] placements {}: only norm operations make a norm partial. Use another placement.", verb,
                  to_string(placements));
    if (!placements[i].is_partial() || !mesh.coordinate() || (*mesh.coordinate())[i] == 0) continue;
    if (placements[i].reduce_op == ReduceOp::kSum) neutral = 0;
    if (placements[i].reduce_op == ReduceOp::kProduct) neutral = 1;
  }
  return neutral;
}

// `fill(local, placements, counts)` writes this rank's values. `counts` is false if the tensor does not use these
// values, because the rank is outside the mesh or because make() overwrites them with the neutral value of a Partial. A
// random factory then draws no values, but still increases the count of random operations, so that the count stays
// equal on all ranks.
template <class Fill>
at::Tensor make(const char* verb, const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements,
                const FactoryOptions& options, c10::ScalarType default_type, Fill fill) {
  if (placements.empty()) placements.assign(mesh->ndim(), Replicate());
  for (const int64_t extent : size) {
    TESSERA_CHECK(extent >= 0, ErrorKind::kShape, "[dtensor.{}] size: found {}, wanted 0 or more.", verb, extent);
  }
  check_placements(verb, *mesh, placements, static_cast<int64_t>(size.size()));
  const auto plain = at::TensorOptions(mesh->device()).dtype(options.dtype.value_or(default_type));
  at::Tensor local;
  {
    at::NoGradGuard no_grad;
    local = at::empty(local_sizes(size, *mesh, placements), plain);
    if (mesh->coordinate()) {
      const auto neutral = neutral_of(verb, *mesh, placements);
      fill(local, placements, !neutral.has_value());
      if (neutral) local.fill_(*neutral);
    } else {
      fill(local, placements, false);
    }
  }
  at::Tensor made = make_dtensor(local, mesh, make_shared_placements(placements), size);
  return made.set_requires_grad(options.requires_grad);
}

at::Tensor make_filled(const char* verb, const std::vector<int64_t>& size, const c10::Scalar& value,
                       const MeshPtr& mesh, Placements placements, const FactoryOptions& options,
                       c10::ScalarType default_type) {
  return make(verb, size, mesh, std::move(placements), options, default_type,
              [&](const at::Tensor& local, const Placements&, bool) { local.fill_(value); });
}

at::Tensor make_random(const char* verb, const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements,
                       const FactoryOptions& options, c10::ScalarType default_type, const Distribution& distribution) {
  return make(verb, size, mesh, std::move(placements), options, default_type,
              [&](const at::Tensor& local, const Placements& checked, bool counts) {
                if (!mesh->coordinate()) {
                  skip_random_operation(*mesh);
                  return;
                }
                // All ranks of the mesh count the random operation, also those whose random values are not used
                // (`counts` is false).
                const RandomStreamKey key = next_random_key(*mesh, std::nullopt);
                if (counts) fill_random(local, ShardRegion(size, *mesh, checked), key, distribution);
              });
}

c10::ScalarType default_type() { return c10::get_default_dtype_as_scalartype(); }

}  // namespace

at::Tensor empty(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements,
                 const FactoryOptions& options) {
  return make("empty", size, mesh, std::move(placements), options, default_type(),
              [](const at::Tensor&, const Placements&, bool) {});
}

at::Tensor zeros(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements,
                 const FactoryOptions& options) {
  // With Partial(product) the first rank has zeros and the others have ones, so the product is zero.
  return make_filled("zeros", size, 0, mesh, std::move(placements), options, default_type());
}

at::Tensor ones(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements,
                const FactoryOptions& options) {
  return make_filled("ones", size, 1, mesh, std::move(placements), options, default_type());
}

at::Tensor full(const std::vector<int64_t>& size, const c10::Scalar& value, const MeshPtr& mesh, Placements placements,
                const FactoryOptions& options) {
  const auto kind = value.isBoolean()                         ? at::kBool
                    : value.isIntegral(/*includeBool=*/false) ? at::kLong
                    : value.isComplex()                       ? c10::toComplexType(default_type())
                                                              : default_type();
  return make_filled("full", size, value, mesh, std::move(placements), options, kind);
}

at::Tensor rand(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements,
                const FactoryOptions& options) {
  return make_random("rand", size, mesh, std::move(placements), options, default_type(),
                     {DistributionKind::kUniform, 0, 1});
}

at::Tensor randn(const std::vector<int64_t>& size, const MeshPtr& mesh, Placements placements,
                 const FactoryOptions& options) {
  return make_random("randn", size, mesh, std::move(placements), options, default_type(),
                     {DistributionKind::kNormal, 0, 1});
}

at::Tensor randint(int64_t low, int64_t high, const std::vector<int64_t>& size, const MeshPtr& mesh,
                   Placements placements, const FactoryOptions& options) {
  TESSERA_CHECK(low < high, ErrorKind::kShape,
                "[dtensor.randint] found integers from {} to {}, wanted a range with low < high.", low, high);
  const Distribution integers{.kind = DistributionKind::kInteger,
                              .low = low,
                              .range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low)};
  return make_random("randint", size, mesh, std::move(placements), options, at::kLong, integers);
}

}  // namespace tessera::dtensor
