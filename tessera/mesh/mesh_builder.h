// Builds root meshes and submeshes, and holds the process groups that they share. Internal to mesh/.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

// The process group along one mesh dim, or over several dims. The group is created at its first use, and all meshes
// that contain the dims share it.
struct DeviceMesh::GroupSlot {
  std::mutex mutex;
  std::vector<int> ranks;
  std::string name;
  std::shared_ptr<comm::Group> group;
};

// Data that a root mesh shares with all its submeshes: the groups over several dims, the names that flatten()
// registered, and mesh ids. Meshes own this object, so it must not own meshes.
struct DeviceMesh::RootMeshState {
  struct FlattenedDim {
    std::shared_ptr<GroupSlot> slot;
    std::vector<std::string> dims;  // dims that were flattened; a flattened dim is replaced by its own dims
  };
  std::mutex mutex;
  std::map<std::string, FlattenedDim> by_name;
  std::map<std::vector<int>, std::shared_ptr<GroupSlot>> by_ranks;  // groups over several dims
  // mesh ids of submeshes, by shape and ranks
  std::map<std::pair<std::vector<int64_t>, std::vector<int>>, uint64_t> ids;
  struct MeshLayout {
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    std::vector<int> ranks;
  };
  std::vector<MeshLayout> layouts;  // the root's layout and those that unflatten() added

  // Returns the GroupSlot for `ranks`, and makes it in the first call. Calls with equal ranks get the same GroupSlot,
  // even if they name different dims. The caller must hold `mutex`.
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
  // A dim of a submesh: a dim of the sliced mesh, or a flattened dim with a name.
  struct NamedDim {
    std::string name;
    int64_t size = 0;
    std::shared_ptr<DeviceMesh::GroupSlot> slot;  // null on a rank that is not part of the mesh
    std::vector<std::string> dims;                // dims that were flattened; only `name` for an ordinary dim
  };

  static std::shared_ptr<DeviceMesh> make(const std::shared_ptr<comm::World>& world, c10::DeviceType device_type,
                                          std::vector<int64_t> shape, std::vector<std::string> names,
                                          std::vector<int> ranks);
  // The ranks that have this rank's coordinate on all dims except `dims`, in row-major order of `dims`. On a rank
  // outside the mesh, 0 takes the place of its coordinates.
  static std::vector<int> ranks_over(const DeviceMesh& mesh, const std::vector<int64_t>& dims);
  // Adds a GroupSlot for each mesh dim. Its ranks are those that have this rank's coordinates on all other mesh dims.
  static void add_slots(DeviceMesh& mesh);
  // Makes the groups of the mesh dims by splitting the world's communicator (ncclCommSplit). Does so only if the mesh
  // has accelerators and contains all ranks of the world, and device_backend_settings().split_groups is true.
  // COLLECTIVE over the world.
  static void split_groups(const DeviceMesh& mesh);
  // Makes `mesh` a submesh of the root. If an earlier submesh has the same shape and ranks, `mesh` gets the id of that
  // submesh.
  static void register_submesh(DeviceMesh& mesh, const std::shared_ptr<DeviceMesh::RootMeshState>& root);
  static MeshPtr make_root(const std::shared_ptr<comm::World>& world, c10::DeviceType type,
                           const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                           std::vector<int> ranks);
  // Returns the NamedDim of the dim `name` of the mesh, or of the flattened dim that flatten() registered under this
  // name. Error kShape if there is neither.
  static NamedDim named_dim(const DeviceMesh& mesh, const std::string& name);
  // Makes the submesh with these dims and ranks.
  static MeshPtr make_submesh(const DeviceMesh& from, const std::vector<NamedDim>& dims, std::vector<int> ranks);
  // A copy of RootMeshState::layouts; locks its mutex.
  static std::vector<DeviceMesh::RootMeshState::MeshLayout> layouts_of(const DeviceMesh& mesh);
  // Returns the submesh over `dims`, of which at least one was made by flatten(). A single dim already has its list of
  // ranks. For several dims the ranks come from the first layout of the root mesh (RootMeshState::layouts) that
  // contains all of `dims` (for a dim made by flatten(): the dims that were flattened). Error kShape if no layout
  // contains them, or if `dims` overlap or are in another order than in that layout.
  static MeshPtr slice_flattened(const DeviceMesh& from, const std::vector<NamedDim>& dims);
  // Returns the submesh over the dims of `first` and `second`. Its ranks come from a layout in RootMeshState::layouts
  // that contains all these dims. Returns null if no layout contains them, if the two meshes have different roots, or
  // if a mesh has no dim names.
  static MeshPtr concatenate(const DeviceMesh& first, const DeviceMesh& second);
  static void set_group(const DeviceMesh& mesh, int64_t dim, const std::shared_ptr<comm::Group>& group);
  // Returns the process group of `slot`, a GroupSlot of the mesh. The first call creates the group. Error kShape on a
  // rank that is not part of the mesh.
  static const std::shared_ptr<comm::Group>& group_of(const DeviceMesh& mesh,
                                                      const std::shared_ptr<DeviceMesh::GroupSlot>& slot);
};

// Names for messages: "'a', 'b'".
std::string quoted_names(const std::vector<std::string>& names);

}  // namespace tessera
