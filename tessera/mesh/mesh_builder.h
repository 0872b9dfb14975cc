// How meshes are made of one another, and the groups that they share. Internal to mesh.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// One group along one dim, made when first asked for and shared by every mesh that holds the dim.
struct DeviceMesh::GroupSlot {
  std::mutex mutex;
  std::vector<int> ranks;
  std::string name;
  std::shared_ptr<comm::Group> group;
};

// The groups over several dims of a root and its submeshes; those of flatten() also by name. Meshes own this, so it
// must not own meshes.
struct DeviceMesh::FlattenedMeshes {
  struct Flattened {
    std::shared_ptr<GroupSlot> slot;
    std::vector<std::string> dims;  // that it was made of, none of them flattened itself
  };
  std::mutex mutex;
  std::map<std::string, Flattened> by_name;
  std::map<std::vector<int>, std::shared_ptr<GroupSlot>> by_ranks;            // groups over several dims
  std::map<std::pair<std::vector<int64_t>, std::vector<int>>, uint64_t> ids;  // of submeshes, by shape and ranks
  struct Arrangement {
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    std::vector<int> ranks;
  };
  std::vector<Arrangement> arrangements;  // the root's, and those that unflatten() made of its ranks

  // One slot for the same ranks, however they were asked for. The mutex must be held.
  std::shared_ptr<GroupSlot> slot_of(const std::vector<int>& ranks, const std::string& name) {
    auto& slot = by_ranks[ranks];
    if (!slot) {
      slot = std::make_shared<GroupSlot>();
      slot->ranks = ranks;
      slot->name = name;
    }
    return slot;
  }
};

struct DeviceMeshBuilder {
  // A dim that a submesh is made of: one of the mesh that is sliced, or one that flatten() gave a name.
  struct NamedDim {
    std::string name;
    int64_t size = 0;
    std::shared_ptr<DeviceMesh::GroupSlot> slot;  // null on a rank that is not part of the mesh
    std::vector<std::string> dims;                // that it was made of; its own name where it is no flattened one
  };

  static std::shared_ptr<DeviceMesh> make(const std::shared_ptr<comm::World>& world, c10::DeviceType device_type,
                                          std::vector<int64_t> shape, std::vector<std::string> names,
                                          std::vector<int> ranks);
  // The ranks that differ from this one on the given dims only, row-major. On a rank outside the mesh: at the origin of
  // the other dims.
  static std::vector<int> ranks_over(const DeviceMesh& mesh, const std::vector<int64_t>& dims);
  // Slots along each dim for the row that holds this rank.
  static void add_slots(DeviceMesh& mesh);
  // Where the mesh is of accelerators and of all ranks, which are here, its groups are split from the world's.
  static void split_groups(const DeviceMesh& mesh);
  // Makes `mesh` a submesh. One made again has the id of the first.
  static void join(DeviceMesh& mesh, const std::shared_ptr<DeviceMesh::FlattenedMeshes>& root);
  static MeshPtr root(const std::shared_ptr<comm::World>& world, c10::DeviceType type,
                      const std::vector<int64_t>& shape, const std::vector<std::string>& names, std::vector<int> ranks);
  // Error kShape for a name that neither the mesh nor flatten() knows.
  static NamedDim named_dim(const DeviceMesh& mesh, const std::string& name);
  // The submesh of these ranks over these dims.
  static MeshPtr submesh(const DeviceMesh& from, const std::vector<NamedDim>& dims, std::vector<int> ranks);
  // The arrangements of the root's ranks so far.
  static std::vector<DeviceMesh::FlattenedMeshes::Arrangement> arrangements_of(const DeviceMesh& mesh);
  // A slice some of whose dims are flattened ones.
  static MeshPtr slice_flattened(const DeviceMesh& from, const std::vector<NamedDim>& dims);
  // The slice of an arrangement of the same ranks that has the dims of both; null when there is none.
  static MeshPtr concatenate(const DeviceMesh& first, const DeviceMesh& second);
  static void use_group(const DeviceMesh& mesh, int64_t dim, const std::shared_ptr<comm::Group>& group);
  // Error kShape on a rank that is not part of the mesh.
  static const std::shared_ptr<comm::Group>& group_of(const DeviceMesh& mesh,
                                                      const std::shared_ptr<DeviceMesh::GroupSlot>& slot);
};

// "'a', 'b'"
std::string quoted_names(const std::vector<std::string>& names);

}  // namespace tessera
