// An n-dimensional arrangement of ranks on one kind of device, with optional names for its dims. The semantics are
// those of torch.distributed.DeviceMesh.
//
//   auto mesh = init_device_mesh(world, "cpu", {2, 4}, {"dp", "tp"});   // call it on all ranks
//   auto dp = mesh->slice({"dp"});                                     // this rank's 1-d submesh
//   comm::all_reduce(*mesh->group("dp"), tensor).wait();
//
// Creating, slicing, flattening and unflattening a mesh do not communicate. A group is created at its first use, by its
// own ranks only, so a rank has no more groups than it uses. The exception is an accelerator mesh over the whole world:
// init_device_mesh splits its groups from the world's communicator, which is COLLECTIVE over the world (setting
// `comm.split_groups`).
//
// A mesh is immutable, is shared by shared_ptr (MeshPtr) and belongs to one rank.
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
  const std::vector<std::string>& dim_names() const { return dim_names_; }  // empty when the dims have no names
  c10::DeviceType device_type() const { return device_type_; }
  c10::Device device() const;  // this rank's device: the CPU, or the accelerator of its local rank (device_choice.h)
  const std::vector<int>& ranks() const { return ranks_; }  // global ranks, row-major
  int rank() const;                                         // global number of this rank
  // This rank's coordinate, one number for each dim; nullopt when this rank is not part of the mesh.
  const std::optional<std::vector<int64_t>>& coordinate() const { return coordinate_; }
  int64_t local_rank(int64_t dim) const;  // this rank's coordinate on one dim

  int64_t dim_of(const std::string& name) const;  // Error kShape for an unknown name; the message lists the valid names
  bool has_dim(const std::string& name) const;
  // The group of the ranks along `dim` that contains this rank. COLLECTIVE over the group at its first use. A dim that
  // spans the world shares the world's group.
  const std::shared_ptr<comm::Group>& group(int64_t dim) const;
  // The process group of the dim `name` of this mesh, or of the 1-d mesh that flatten(name) made from any mesh with the
  // same root mesh.
  const std::shared_ptr<comm::Group>& group(const std::string& name) const;
  // The process group over several dims, given in ascending order: the ranks that have this rank's coordinate on all
  // other dims. COLLECTIVE over the group at its first use. All submeshes of one root mesh share the group.
  const std::shared_ptr<comm::Group>& group(const std::vector<int64_t>& dims) const;
  // The group of each dim. COLLECTIVE over each group at its first use, in the order of the dims.
  std::vector<std::shared_ptr<comm::Group>> groups() const;
  // The submesh over some dims, in mesh order, that contains this rank. It shares its groups with this mesh. Names that
  // flatten() registered are valid, too: slice({"dp_cp", "tp"}). Error kShape for an unknown dim and for a dim that two
  // names contain.
  MeshPtr slice(const std::vector<std::string>& names) const;
  // A 1-d mesh of all ranks of this mesh. The root mesh keeps the process group of the 1-d mesh under `name`, so a
  // second call shares this group and slice({name}) finds it. Error kShape if `name` is a dim of the root or a
  // flattened mesh of other ranks.
  MeshPtr flatten(const std::string& name = "") const;
  // Splits dim `dim` into several dims, of which the last varies fastest. This is the inverse of flatten. Other dims
  // keep their groups. Error kShape if the product of `sizes` is not the size of the dim, and for duplicate or missing
  // names.
  MeshPtr unflatten(int64_t dim, const std::vector<int64_t>& sizes, const std::vector<std::string>& names = {}) const;
  MeshPtr unflatten(const std::string& dim, const std::vector<int64_t>& sizes,
                    const std::vector<std::string>& names) const {
    return unflatten(dim_of(dim), sizes, names);
  }
  const std::shared_ptr<comm::World>& world() const { return world_; }

  // For example "DeviceMesh((dp=2, tp=4), 'cpu')".
  std::string to_string() const;
  // Two meshes are equal if they have the same world, ranks, shape, dim names and device type. Equal meshes have the
  // same hash().
  bool operator==(const DeviceMesh& other) const;
  size_t hash() const { return hash_; }
  // A key for caches that must not hold references to meshes. Two meshes of a process have the same id only if they are
  // submeshes of one root with the same shape and ranks.
  uint64_t id() const { return id_; }

 private:
  friend struct DeviceMeshBuilder;
  struct GroupSlot;
  struct RootMeshState;
  DeviceMesh() = default;
  std::shared_ptr<comm::World> world_;
  c10::DeviceType device_type_ = c10::DeviceType::CPU;
  std::vector<int64_t> shape_;
  std::vector<std::string> dim_names_;
  std::vector<int> ranks_;
  std::optional<std::vector<int64_t>> coordinate_;
  std::vector<std::shared_ptr<GroupSlot>> slots_;  // one for each dim; the group in it is created at its first use
  std::shared_ptr<RootMeshState> root_state_;      // shared with the root
  size_t hash_ = 0;
  uint64_t id_ = 0;
};

// A mesh of the ranks 0..product-1 of the world in row-major order. Call it with equal arguments on all ranks of the
// world. It is COLLECTIVE over the world when it splits an accelerator's groups from the world's communicator.
// `device_type` is "cpu", "cuda" or the name that a library registered for its accelerator with libtorch (PrivateUse1).
// Error kShape for a device type with an index, for names that are not unique or do not match the shape, and for a mesh
// larger than the world.
MeshPtr init_device_mesh(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names = {});

// A mesh of any ranks. `ranks` are global ranks in row-major order, each at most once. On ranks that are not in
// `ranks`, coordinate() is nullopt. It corresponds to torch's DeviceMesh(type, tensor).
MeshPtr make_device_mesh(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<int>& ranks, const std::vector<int64_t>& shape,
                         const std::vector<std::string>& dim_names = {});
// The submesh over the dims of two slices of one root mesh, in the root's order of dims: (dp) and (tp) give (dp, tp).
// It shares the process groups of the slices. It corresponds to torch's DeviceMesh._concatenate. Error kShape for
// meshes of different roots, a dim in both meshes, and a flattened dim.
MeshPtr concatenate(const MeshPtr& first, const MeshPtr& second);
// A mesh over existing groups, one for each dim; the mesh shares the groups. A comm::Group can hold any c10d back-end.
// With one group the mesh is 1-d over its ranks. With several groups `ranks` and `shape` give the arrangement, and the
// group of a dim must consist of the ranks that have this rank's coordinate on all other dims (else Error kShape).
MeshPtr mesh_from_groups(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<std::shared_ptr<comm::Group>>& groups, const std::vector<int>& ranks = {},
                         const std::vector<int64_t>& shape = {}, const std::vector<std::string>& dim_names = {});

}  // namespace tessera
