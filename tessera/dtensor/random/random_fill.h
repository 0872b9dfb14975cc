// Filling this rank's part of a tensor with random numbers that are functions of the global element index.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

// Names one stream of numbers: element i of an operation's result is a function of (seed, operation, i).
struct RandomKey {
  uint64_t seed = 0;
  uint64_t operation = 0;
};

// The part of a global tensor that lies on this rank, as global indices.
struct Region {
  Region() = default;
  // The whole tensor.
  explicit Region(c10::IntArrayRef global_sizes);
  // Of this rank, which must be part of the mesh.
  Region(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& placements);
  // The same with one more dim, whole on every rank.
  Region with_last_dim(int64_t size) const;
  int64_t numel() const;

  Sizes global;                    // global sizes
  Sizes sizes;                     // local sizes
  c10::SmallVector<Runs, 6> runs;  // by dim
};

enum class Law : uint8_t { kUniform, kNormal, kExponential, kLogNormal, kCauchy, kGeometric, kInteger };

// kUniform [a, b); kNormal and kLogNormal mean a, deviation b; kExponential rate a; kCauchy median a, width b;
// kGeometric success a; kInteger low, low+1 ... low+range-1 (range 0: any 64 bits).
struct Distribution {
  Law law = Law::kUniform;
  double a = 0;
  double b = 1;
  int64_t low = 0;
  uint64_t range = 0;
};

// Overwrites `part`, whose sizes are the region's, with draws. bfloat16 and float16 are drawn in float with as many
// digits as they hold, integers from kGeometric and kInteger. On CPU by a loop over the elements, elsewhere by ATen
// operations (fill_by_operations) that give the same bits; what log and cos make of them may differ between kinds of
// devices.
void fill_random(const at::Tensor& part, const Region& region, const RandomKey& key, const Distribution& distribution);
void fill_by_operations(const at::Tensor& part, const Region& region, const RandomKey& key,
                        const Distribution& distribution);
// Calls visit(local, global, count) for stretches of elements that are consecutive in this rank's memory and in the
// whole tensor, from several threads.
void for_each_stretch(const Region& region, const std::function<void(int64_t, int64_t, int64_t)>& visit);
// Digits of the fractions that kUniform gives: all that the type holds.
int digits_of(c10::ScalarType type);

// The stream of the next random operation on this mesh; see random.h for when it is COLLECTIVE.
RandomKey next_random_key(const DeviceMesh& mesh, const std::optional<at::Generator>& generator);
// A rank outside the mesh keeps in step with those inside.
void skip_random_operation(const DeviceMesh& mesh);

}  // namespace tessera
