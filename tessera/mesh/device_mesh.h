// An n-dimensional, named arrangement of ranks on one kind of device. Semantics of torch.distributed.DeviceMesh.
//
//   auto mesh = init_device_mesh(world, "cpu", {2, 4}, {"dp", "tp"});   // COLLECTIVE over all ranks
//   auto dp = mesh->slice({"dp"});                                     // this rank's 1-d submesh
//   comm::all_reduce(*mesh->group("dp"), tensor).wait();
//
// Making, slicing, flattening or unflattening a mesh communicates nothing: a group is made when it is first used, and
// then by its own ranks only, so a rank never has more groups than it uses. But for an accelerator's mesh of the whole
// world: init_device_mesh splits its groups from the world's communicator, which takes all ranks at once
// (`comm.split_groups`).
//
// Immutable after creation and shared by shared_ptr (MeshPtr); belongs to one rank.
#pragma once

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/rendezvous/world.h"

namespace tessera {

class DeviceMesh;
using MeshPtr = std::shared_ptr<const DeviceMesh>;

class DeviceMesh : public std::enable_shared_from_this<DeviceMesh> {
 public:
  int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t size() const;  // number of ranks
  int64_t size(int64_t dim) const { return shape_.at(static_cast<size_t>(dim)); }
  const std::vector<std::string>& dim_names() const { return dim_names_; }  // empty: unnamed
  c10::DeviceType device_type() const { return device_type_; }
  c10::Device device() const;  // this rank's: the CPU, or the accelerator that it takes (device_choice.h)
  const std::vector<int>& ranks() const { return ranks_; }  // global ranks, row-major
  int rank() const;                                         // this rank, global
  // This rank's position on each dim; nullopt when it is not part of the mesh.
  const std::optional<std::vector<int64_t>>& coordinate() const { return coordinate_; }
  int64_t local_rank(int64_t dim) const;  // coordinate on one dim

  int64_t dim_of(const std::string& name) const;  // Error kShape names the valid ones
  bool has_dim(const std::string& name) const;
  // The group along dim that holds this rank. COLLECTIVE over it at its first use; a dim that spans the world shares
  // the world's group.
  const std::shared_ptr<comm::Group>& group(int64_t dim) const;
  // Of a dim, or of what flatten() gave this name in any mesh of the root.
  const std::shared_ptr<comm::Group>& group(const std::string& name) const;
  // The group over several dims (ascending): the ranks that agree with this one on all others. Like group(dim); shared
  // by all meshes of one root.
  const std::shared_ptr<comm::Group>& group(const std::vector<int64_t>& dims) const;
  // That of each dim. COLLECTIVE over each of them, in the order of dims, at their first use.
  std::vector<std::shared_ptr<comm::Group>> groups() const;
  // The submesh over some dims (in mesh order) that holds this rank; groups are shared with this mesh. Names that
  // flatten() gave count as dims, too: slice({"dp_cp", "tp"}). Errors kShape: no such dim, one that is in two of them.
  MeshPtr slice(const std::vector<std::string>& names) const;
  // All dims as one. Its group is kept at the root under the name, so a second call shares it; slice({name}) finds it.
  // Error kShape: the name of a dim of the root, or of a flattened mesh of other ranks.
  MeshPtr flatten(const std::string& name = "") const;
  // Dim `dim` as several, of which the last varies fastest: flatten's inverse. Other dims keep their groups. Errors
  // kShape: sizes whose product is not the dim's, names that are taken or missing.
  MeshPtr unflatten(int64_t dim, const std::vector<int64_t>& sizes, const std::vector<std::string>& names = {}) const;
  MeshPtr unflatten(const std::string& dim, const std::vector<int64_t>& sizes,
                    const std::vector<std::string>& names) const {
    return unflatten(dim_of(dim), sizes, names);
  }
  const std::shared_ptr<comm::World>& world() const { return world_; }

  // "DeviceMesh((dp=2, tp=4), 'cpu')"
  std::string to_string() const;
  // Same ranks, shape, names and device. `hash()` agrees with it.
  bool operator==(const DeviceMesh& other) const;
  size_t hash() const { return hash_; }
  // For caches, which need not keep meshes alive: no other mesh of this process has it but the same part of the same
  // root that was sliced or flattened again.
  uint64_t id() const { return id_; }

 private:
  friend struct DeviceMeshBuilder;
  struct GroupSlot;
  struct FlattenedMeshes;
  DeviceMesh() = default;
  std::shared_ptr<comm::World> world_;
  c10::DeviceType device_type_ = c10::DeviceType::CPU;
  std::vector<int64_t> shape_;
  std::vector<std::string> dim_names_;
  std::vector<int> ranks_;
  std::optional<std::vector<int64_t>> coordinate_;
  std::vector<std::shared_ptr<GroupSlot>> slots_;  // one per dim; groups are made at first use
  std::shared_ptr<FlattenedMeshes> flattened_;     // shared with the root
  size_t hash_ = 0;
  uint64_t id_ = 0;
};

// Ranks 0..product-1 of the world in row-major order; to be called alike on all ranks, COLLECTIVE over the world where
// an accelerator's groups are split from the world's. device_type: "cpu",
// "cuda", or the name under which a library registered its accelerator with libtorch (PrivateUse1). Errors kShape:
// device type with an index, names that are not unique or do not match the shape, mesh larger than the world.
MeshPtr init_device_mesh(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names = {});

// Any arrangement: `ranks` (global, row-major, each once) in the given shape. Ranks that are not among them have no
// coordinate. As torch's DeviceMesh(type, tensor).
MeshPtr make_device_mesh(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<int>& ranks, const std::vector<int64_t>& shape,
                         const std::vector<std::string>& dim_names = {});
// The submesh over the dims of two slices of one mesh, in its order: (dp) and (tp) give (dp, tp) again. Groups are
// shared. As torch's DeviceMesh._concatenate. Errors kShape: meshes of different origin, a dim that both have, a
// flattened dim.
MeshPtr concatenate(const MeshPtr& first, const MeshPtr& second);
// Over groups that exist already, one a dim; they are shared, not made again. A comm::Group holds any c10d back-end.
// With one group the mesh is 1-d over its ranks. With several, `ranks` and `shape` say how all ranks lie, and each
// group must be this rank's row along its dim. Errors kShape where they are not.
MeshPtr mesh_from_groups(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<std::shared_ptr<comm::Group>>& groups, const std::vector<int>& ranks = {},
                         const std::vector<int64_t>& shape = {}, const std::vector<std::string>& dim_names = {});

}  // namespace tessera
