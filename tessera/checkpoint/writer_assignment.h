// Decides which rank writes which part of a checkpoint. Each part is written once, and the ranks write about equally
// many bytes. Internal to checkpoint.
//
//   const auto claims = all_gather(partial_mesh_claims(tensors, holders));
//   WriterAssignment assignment(world->rank(), holders, choose_meshes(claims, holders));
//   for (size_t i = 0; i < tensors.size(); ++i) if (assignment.assign(tensors[i].second, i)) ...
//
// `holders` are the ranks with the same tensor names as this rank. All holders must make the same calls in the same
// order; then each part has exactly one writer. Of the ranks that hold the same elements, the rank with the fewest
// assigned bytes writes them. Several meshes may hold the same DTensor if each mesh has only some of the holders; then
// the ranks of the mesh with the lowest rank write it, those with coordinate 0 in all replicated mesh dims. No
// communication: the caller runs the all_gather above, COLLECTIVE over the world.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera {

// Returns a binary message for choose_meshes(). `holders` are the ranks that hold the same tensors as this rank. The
// message lists the DTensors of this rank whose mesh does not consist of exactly these ranks, each with the lowest rank
// of its mesh.
std::string partial_mesh_claims(const NamedTensors& tensors, const std::vector<int>& holders);
// `claims` has the message of each rank of the world, in rank order: the result of its partial_mesh_claims(). `holders`
// is the argument of this rank's partial_mesh_claims(). For each DTensor that the message of one of the holders lists,
// chooses the mesh whose ranks write the DTensor: of the meshes in these messages the one with the lowest rank. In
// ChosenMeshes the key is the DTensor's position in the `tensors` of partial_mesh_claims(), and the value is the lowest
// rank of the chosen mesh.
using ChosenMeshes = std::map<size_t, int>;
ChosenMeshes choose_meshes(const std::vector<std::string>& claims, const std::vector<int>& holders);

class WriterAssignment {
 public:
  WriterAssignment(int rank, const std::vector<int>& holders, ChosenMeshes chosen = {});

  // Assigns the tensor at `position` to its writers. Returns whether this rank writes its local part of the tensor.
  bool assign(const at::TensorBase& tensor, size_t position);
  // Whether this rank writes the objects and empty tensors, which are too small to balance.
  bool is_first_holder() const { return rank_ == holders_.front(); }

 private:
  bool assign_replicated(int64_t bytes);
  bool assign_shards(const at::TensorBase& tensor);
  bool is_chosen_replica(const at::TensorBase& tensor, size_t position) const;

  int rank_;
  std::vector<int> holders_;      // ascending
  std::map<int, int64_t> bytes_;  // bytes that each holder writes so far
  ChosenMeshes chosen_;
};

}  // namespace tessera
