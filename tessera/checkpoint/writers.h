// Which rank writes which part of a checkpoint, so that each part is written once and the ranks write about equally
// much. Internal to checkpoint.
//
//   const auto claims = all_gather(partial_mesh_claims(tensors, holders));
//   Writers writers(world->rank(), holders, choose_meshes(claims, holders));
//   for (size_t i = 0; i < tensors.size(); ++i) if (writers.write_here(tensors[i].second, i)) ...
//
// `holders` are the ranks whose tensors are called as this one's. Each of them asks for the same tensors in the same
// order and gets answers that fit together. A replica goes to the rank that has the least to write so far. A DTensor
// over some of the ranks only is written in one of the meshes that it lies on, the one with the lowest rank, by its
// first replica. No communication: the all_gather above is the caller's, COLLECTIVE over the world.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera {

// What a rank tells the others of the DTensors that it holds a part of and not all holders do.
std::string partial_mesh_claims(const NamedTensors& tensors, const std::vector<int>& holders);
// The lowest rank of the mesh that writes such a DTensor, by its position among the tensors. `claims` are those of all
// ranks of the world.
using ChosenMeshes = std::map<size_t, int>;
ChosenMeshes choose_meshes(const std::vector<std::string>& claims, const std::vector<int>& holders);

class Writers {
 public:
  Writers(int rank, const std::vector<int>& holders, ChosenMeshes chosen = {});

  // Whether this rank writes its part of the tensor at this position.
  bool write_here(const at::TensorBase& tensor, size_t position);
  // Whether it writes what there is one of and all holders have, however small.
  bool first() const { return rank_ == holders_.front(); }

 private:
  bool write_plain(int64_t bytes);
  bool write_part(const at::TensorBase& tensor);
  bool write_part_of_some(const at::TensorBase& tensor, size_t position) const;

  int rank_;
  std::vector<int> holders_;      // in ascending order
  std::map<int, int64_t> bytes_;  // that each holder writes, of what all of them know of
  ChosenMeshes chosen_;
};

}  // namespace tessera
