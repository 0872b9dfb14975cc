// Fills this rank's local tensor with random numbers. Each number is a function of the seed, the number of the random
// operation and the element's global index.
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

// The elements of a global tensor that this rank holds, as ranges of global indices in each dim.
struct ShardRegion {
  ShardRegion() = default;
  // The region of all elements.
  explicit ShardRegion(c10::IntArrayRef global_sizes);
  // The region that this rank holds with these placements. The rank must be in the mesh.
  ShardRegion(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& placements);
  // Returns this region with one more dim at the end, of which every rank holds all `size` indices.
  ShardRegion with_last_dim(int64_t size) const;
  int64_t numel() const;

  Sizes global;                                 // global sizes
  Sizes sizes;                                  // local sizes
  c10::SmallVector<IndexSpans, 6> index_spans;  // for each dim: spans of global indices
};

enum class DistributionKind : uint8_t { kUniform, kNormal, kExponential, kLogNormal, kCauchy, kGeometric, kInteger };

// A distribution and its parameters. kUniform: [a, b). kNormal and kLogNormal: mean a, standard deviation b (of the
// logarithm). kExponential: rate a. kCauchy: median a, width b. kGeometric: success probability a. kInteger: integers
// in [low, low + range); range 0 means 2^64.
struct Distribution {
  DistributionKind kind = DistributionKind::kUniform;
  double a = 0;
  double b = 1;
  int64_t low = 0;
  uint64_t range = 0;
};

// Overwrites `part`, whose sizes must be region.sizes, with random numbers. bfloat16 and float16 values are computed in
// float and then rounded. All distributions but kNormal, kLogNormal and kInteger are computed from uniform numbers in
// [0, 1) with fraction_bits(dtype of `part`) binary digits, for integer tensors 53. Integer tensors accept kGeometric
// and kInteger. On the CPU a loop computes the elements; on other devices fill_by_operations() computes them with ATen
// operations from the same random bits. Values that are computed with log or cos may differ in the last bits between
// types of devices.
void fill_random(const at::Tensor& part, const ShardRegion& region, const RandomStreamKey& key,
                 const Distribution& distribution);
void fill_by_operations(const at::Tensor& part, const ShardRegion& region, const RandomStreamKey& key,
                        const Distribution& distribution);
// Calls visit(local, global, count) for ranges of elements that are consecutive both in this rank's memory and in the
// global tensor. Several threads call `visit` at once. `local` and `global` are the linear indices of the range's first
// element.
void for_each_contiguous_range(const ShardRegion& region, const std::function<void(int64_t, int64_t, int64_t)>& visit);
// Number of binary digits of the uniform numbers in [0, 1) that are drawn for this dtype: the digits of its significand
// (at most 24, for double 53).
int fraction_bits(c10::ScalarType type);

// Counts a random operation on this mesh and returns the key of its stream. Given a generator, makes the key from the
// generator's state and does not count. random.h says when this is COLLECTIVE.
RandomStreamKey next_random_key(const DeviceMesh& mesh, const std::optional<at::Generator>& generator);
// Counts a random operation on a rank outside the mesh, so that after manual_seed() its count stays equal to that of
// the ranks in the mesh. Does nothing without manual_seed().
void skip_random_operation(const DeviceMesh& mesh);

}  // namespace tessera
