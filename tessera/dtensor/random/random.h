// Random numbers of DTensors. The value of an element depends on the seed, on the number of random operations that ran
// before, and on the element's index in the global tensor. It does not depend on the mesh or the placements, so a mesh
// of one rank gives bitwise the same values as any other mesh.
//
//   manual_seed(42, mesh);                                  // the same seed on all ranks
//   at::Tensor w = dtensor::randn({8, 4}, mesh, {Shard(0)});
//   w.uniform_(-1, 1);                                      // likewise for nn::init, dropout, bernoulli ...
//
// Without manual_seed the first random operation on a mesh takes its seed from the default generator of the mesh's
// first rank; this operation is COLLECTIVE over the mesh. An operation with a `generator` argument uses that generator
// instead, which must have the same state on all ranks of the mesh. The random state belongs to a rank (its World). Two
// threads must not use one rank's state at the same time.
#pragma once

#include <cstdint>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// Sets the seed for all meshes of this rank and the number of random operations to 0. No communication: the caller must
// pass the same seed on all ranks of a mesh.
void manual_seed(uint64_t seed, const MeshPtr& mesh);

// The state of this rank's random numbers. It is saved and restored to draw the same numbers again (activation
// checkpointing) or to resume a run.
struct RandomState {
  uint64_t seed = 0;
  uint64_t offset = 0;  // number of random operations so far
  bool operator==(const RandomState&) const = default;
};
// Returns the state that the next random operation on the mesh uses. COLLECTIVE over the mesh if the mesh has no seed
// yet.
RandomState random_state(const MeshPtr& mesh);
// Sets the seed and the number of random operations for all meshes of this rank to the values in `state`. No
// communication: the caller must pass the same state on all ranks of a mesh.
void set_random_state(const RandomState& state, const MeshPtr& mesh);

}  // namespace tessera
