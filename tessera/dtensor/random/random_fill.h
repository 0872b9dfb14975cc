// Fills this rank's part of a tensor with random numbers. Each number is a function of the element's global index.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

// Key of one stream of random numbers: element i of an operation's result is a function of (seed, operation, i).
struct RandomStreamKey {
  uint64_t seed = 0;
  uint64_t operation = 0;
};

// The part of a global tensor that this rank holds, as global indices.
struct ShardRegion {
  ShardRegion() = default;
  // The whole tensor.
  explicit ShardRegion(c10::IntArrayRef global_sizes);
  // The part that this rank holds. The rank must be in the mesh.
  ShardRegion(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& placements);
  // The same region with one more dim at the end, which is whole on every rank.
  ShardRegion with_last_dim(int64_t size) const;
  int64_t numel() const;

  Sizes global;                                 // global sizes
  Sizes sizes;                                  // local sizes
  c10::SmallVector<IndexSpans, 6> index_spans;  // for each dim: spans of global indices
};

enum class DistributionKind : uint8_t { kUniform, kNormal, kExponential, kLogNormal, kCauchy, kGeometric, kInteger };

// Parameters of the kinds. kUniform: [a, b). kNormal and kLogNormal: mean a, standard deviation b (of the logarithm).
// kExponential: rate a. kCauchy: median a, width b. kGeometric: success probability a. kInteger: low ... low + range -
// 1; range 0 means any 64 bits.
struct Distribution {
  DistributionKind kind = DistributionKind::kUniform;
  double a = 0;
  double b = 1;
  int64_t low = 0;
  uint64_t range = 0;
};

// Overwrites `part`, whose sizes must be region.sizes, with random numbers. bfloat16 and float16 are drawn in float
// with the number of digits that the type holds; integer tensors accept kGeometric and kInteger. The CPU uses a loop
// over the elements, other devices use ATen operations (fill_by_operations) with the same bits. Values that go through
// log or cos may differ in the last bits between kinds of devices.
void fill_random(const at::Tensor& part, const ShardRegion& region, const RandomStreamKey& key,
                 const Distribution& distribution);
void fill_by_operations(const at::Tensor& part, const ShardRegion& region, const RandomStreamKey& key,
                        const Distribution& distribution);
// Calls visit(local, global, count) for ranges of elements that are consecutive both in this rank's memory and in the
// global tensor. The calls come from several threads.
void for_each_contiguous_range(const ShardRegion& region, const std::function<void(int64_t, int64_t, int64_t)>& visit);
// Number of binary digits in the fractions of kUniform: all digits that the type holds.
int fraction_bits(c10::ScalarType type);

// Takes the stream of the next random operation on this mesh. random.h says when this is COLLECTIVE.
RandomStreamKey next_random_key(const DeviceMesh& mesh, const std::optional<at::Generator>& generator);
// Counts a random operation on a rank outside the mesh, so that its count stays equal to that of the ranks inside.
void skip_random_operation(const DeviceMesh& mesh);

}  // namespace tessera
