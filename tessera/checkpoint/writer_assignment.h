// Decides which rank writes which part of a checkpoint. Each part is written once, and the ranks write about equally
// many bytes. Internal to checkpoint.
//
//   const auto claims = all_gather(partial_mesh_claims(tensors, holders));
//   WriterAssignment assignment(world->rank(), holders, choose_meshes(claims, holders));
//   for (size_t i = 0; i < tensors.size(); ++i) if (assignment.assign(tensors[i].second, i)) ...
//
// `holders` are the ranks with the same tensor names as this rank. Each of them must make the same calls in the same
// order; then their answers agree. A replica is written by the rank with the fewest bytes so far. A DTensor whose mesh
// has only some of the holders may exist on several meshes; the mesh with the lowest rank writes it, by its first
// replica. No communication: the caller runs the all_gather above, COLLECTIVE over the world.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera {

// A rank's message about the DTensors that it holds a part of, but not all holders do. Binary.
std::string partial_mesh_claims(const NamedTensors& tensors, const std::vector<int>& holders);
// Chooses the mesh that writes each such DTensor: the lowest rank of the mesh, by the DTensor's position among the
// tensors. `claims` has the messages of all ranks of the world.
using ChosenMeshes = std::map<size_t, int>;
ChosenMeshes choose_meshes(const std::vector<std::string>& claims, const std::vector<int>& holders);

class WriterAssignment {
 public:
  WriterAssignment(int rank, const std::vector<int>& holders, ChosenMeshes chosen = {});

  // Assigns the tensor at this position. Returns whether this rank writes its part of it.
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
