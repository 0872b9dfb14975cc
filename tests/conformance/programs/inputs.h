// The values of a program's inputs, and their placement on a mesh.
#pragma once

#include "tests/conformance/programs/evaluate.h"
#include "tests/conformance/shares.h"

namespace tessera::testing {

// Returns the same values for the same step and seed.
at::Tensor make_plain(const Step& step, uint64_t seed);

// Returns a plain tensor as a DTensor. Every rank passes the whole tensor. The shares of a Partial differ from rank to
// rank; their reduction is exactly the tensor, except for kAvg over 3 ranks and norms. No communication.
at::Tensor lay_out(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements);

// Returns the next of a sequence of random numbers (splitmix64).
uint64_t next_number(uint64_t& state);

}  // namespace tessera::testing
