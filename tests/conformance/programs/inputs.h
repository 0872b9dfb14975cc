// What the inputs of programs hold, and how they come to lie on a mesh.
#pragma once

#include "tests/conformance/programs/evaluate.h"
#include "tests/conformance/shares.h"

namespace tessera::testing {

// The same for the same step and seed.
at::Tensor make_plain(const Step& step, uint64_t seed);

// A plain tensor as a DTensor, which every rank passes whole. Of a Partial the ranks get shares that differ and reduce
// to the tensor without rounding, but for kAvg over 3 ranks and norms. No communication.
at::Tensor lay_out(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements);

// The next of a sequence of numbers (splitmix64).
uint64_t next_number(uint64_t& state);

}  // namespace tessera::testing
