// The placements in which a sample's tensors are tried, and the placing of a plain tensor.
//
//   for (const auto& how : combinations(slots)) { ... place(slot.plain, mesh, {how[i]}) ... }
#pragma once

#include <rapidcheck/Random.h>

#include <string>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/conformance/samples.h"

namespace tessera::testing {

// A tensor among the arguments of a sample. The elements of a list have one slot each.
struct Slot {
  int arg;
  int element;  // -1: not in a list
  at::Tensor plain;
  bool mutated;
  bool whole;  // stays replicated
};
std::vector<Slot> slots_of(const Sample& sample);
// Returns the arguments with `tensors` in place of the sample's tensors, in the order of the slots.
std::vector<c10::IValue> with_tensors(const Sample& sample, const std::vector<Slot>& slots, const Tensors& tensors);

// One placement for each slot, for a mesh of one dim. For up to two tensors there are all combinations. For more
// tensors there are each tensor in turn, the regular combinations, and some at random (the same at every run).
using Combination = std::vector<Placement>;
std::vector<Combination> combinations(const std::vector<Slot>& slots);
// Returns more combinations for a mesh of k ranks: strided shards, and the uncommon Partials of each type.
std::vector<Combination> rare_combinations(const std::vector<Slot>& slots, int64_t k);
// Returns placements on every dim of a mesh, drawn by rapidcheck.
std::vector<Placements> random_placements(const std::vector<Slot>& slots, int64_t mesh_ndim, rc::Random& random);

// Makes a DTensor. Every rank passes the same whole tensor. The ranks' shares of a Partial differ. No communication.
at::Tensor place(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements);
// Returns text like "R S(0)".
std::string describe(const std::vector<Placements>& placements);

}  // namespace tessera::testing
