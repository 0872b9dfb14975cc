// Which placements a sample's tensors are tried in, and how a plain tensor comes to lie so.
//
//   for (const auto& how : combinations(slots)) { ... place(slot.plain, mesh, {how[i]}) ... }
#pragma once

#include <rapidcheck/Random.h>

#include <string>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/conformance/samples.h"

namespace tessera::testing {

// A tensor among the arguments of a sample; elements of lists one by one.
struct Slot {
  int arg;
  int element;  // -1: no list
  at::Tensor plain;
  bool mutated;
  bool whole;  // stays replicated
};
std::vector<Slot> slots_of(const Sample& sample);
// The arguments with their tensors, in the order of the slots, replaced.
std::vector<c10::IValue> with_tensors(const Sample& sample, const std::vector<Slot>& slots, const Tensors& tensors);

// One placement a slot, for a mesh of one dim. All combinations for up to two tensors; for more each tensor in turn,
// the regular ones, and some at random (the same at every run).
using Combination = std::vector<Placement>;
std::vector<Combination> combinations(const std::vector<Slot>& slots);
// More of them for a mesh of k ranks, with what those do not have: strided shards, and the other Partials of each type.
std::vector<Combination> rare_combinations(const std::vector<Slot>& slots, int64_t k);
// Placements on every dim of a mesh, drawn by rapidcheck.
std::vector<Placements> random_placements(const std::vector<Slot>& slots, int64_t mesh_ndim, rc::Random& random);

// Every rank passes the same whole tensor. Of a Partial the ranks get shares that differ. No communication.
at::Tensor place(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements);
// "R S(0)".
std::string describe(const std::vector<Placements>& placements);

}  // namespace tessera::testing
