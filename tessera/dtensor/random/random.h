// Random numbers of DTensors: the value of an element depends on the seed, on how many random operations came before,
// and on the element's place in the global tensor; not on the mesh or the placements. So a mesh of one rank gives
// bitwise the values that any other gives.
//
//   manual_seed(42, mesh);                                  // the same on all ranks
//   at::Tensor w = dtensor::randn({8, 4}, mesh, {Shard(0)});
//   w.uniform_(-1, 1);                                      // nn::init, dropout, bernoulli ... work alike
//
// Without manual_seed the first random operation on a mesh takes a seed from the default generator of the mesh's first
// rank: it is COLLECTIVE over the mesh, once. An operation that is given a generator of its own draws from that
// instead; it must be in the same state on all ranks of the mesh. State belongs to a rank (its World). Not thread-safe
// for one rank.
#pragma once

#include <cstdint>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// For all meshes of this rank. No communication: call it with one seed on all ranks that share random tensors.
void manual_seed(uint64_t seed, const MeshPtr& mesh);

// Where this rank stands; to repeat numbers (recomputed activations) or to continue a run.
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;  // random operations so far
  bool operator==(const RandomState&) const = default;
};
// COLLECTIVE over the mesh when it has no seed yet.
RandomState random_state(const MeshPtr& mesh);
// Of the same kind as manual_seed: for all meshes of this rank.
void set_random_state(const RandomState& state, const MeshPtr& mesh);

}  // namespace tessera
