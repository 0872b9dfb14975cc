#include "tessera/mesh/device_mesh.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/backends/device_backends.h"
#include "tessera/mesh/mesh_builder.h"

namespace tessera {

int64_t DeviceMesh::size() const { return static_cast<int64_t>(ranks_.size()); }

int DeviceMesh::rank() const { return world_->rank(); }

c10::Device DeviceMesh::device() const { return comm::device_of_rank(device_type_, world_->info().local_rank); }

int64_t DeviceMesh::local_rank(int64_t dim) const {
  TESSERA_CHECK(coordinate_.has_value(), ErrorKind::kShape,
                "[mesh.local_rank] {}: rank {} is not part of the mesh. Check coordinate() first.", to_string(),
                rank());
  TESSERA_CHECK(dim >= 0 && dim < ndim(), ErrorKind::kShape, "[mesh.local_rank] {}: found dim {}, wanted 0..{}.",
                to_string(), dim, ndim() - 1);
  return (*coordinate_)[dim];
}

bool DeviceMesh::has_dim(const std::string& name) const {
  return std::ranges::find(dim_names_, name) != dim_names_.end();
}

int64_t DeviceMesh::dim_of(const std::string& name) const {
  TESSERA_CHECK(
      !dim_names_.empty(), ErrorKind::kShape,
      "[mesh.slice] {}: asked for dim '{}'. Cannot slice a DeviceMesh without mesh_dim_names! Give dim_names to "
      "init_device_mesh.",
      to_string(), name);
  const auto found = std::ranges::find(dim_names_, name);
  TESSERA_CHECK(found != dim_names_.end(), ErrorKind::kShape,
                "[mesh.slice] {}: Invalid mesh_dim_names ('{}') specified. Valid mesh_dim_names are ({}).", to_string(),
                name, quoted_names(dim_names_));
  return found - dim_names_.begin();
}

const std::shared_ptr<comm::Group>& DeviceMesh::group(int64_t dim) const {
  TESSERA_CHECK(dim >= 0 && dim < ndim(), ErrorKind::kShape, "[mesh.group] {}: found dim {}, wanted 0..{}.",
                to_string(), dim, ndim() - 1);
  return DeviceMeshBuilder::group_of(*this, slots_[dim]);
}

const std::shared_ptr<comm::Group>& DeviceMesh::group(const std::string& name) const {
  // RootMeshState::by_name owns the GroupSlot, so the returned reference stays valid.
  return has_dim(name) ? group(dim_of(name))
                       : DeviceMeshBuilder::group_of(*this, DeviceMeshBuilder::named_dim(*this, name).slot);
}

std::vector<std::shared_ptr<comm::Group>> DeviceMesh::groups() const {
  std::vector<std::shared_ptr<comm::Group>> all;
  for (int64_t dim = 0; dim < ndim(); ++dim) all.push_back(group(dim));
  return all;
}

const std::shared_ptr<comm::Group>& DeviceMesh::group(const std::vector<int64_t>& dims) const {
  if (dims.size() == 1) return group(dims[0]);
  TESSERA_CHECK(
      !dims.empty() && std::ranges::is_sorted(dims, std::less_equal<>()) && dims.front() >= 0 && dims.back() < ndim(),
      ErrorKind::kShape, "[mesh.group] {}: found dims [{}], wanted some of 0..{} in ascending order.", to_string(),
      fmt::join(dims, ", "), ndim() - 1);
  std::shared_ptr<GroupSlot> slot;
  {
    std::lock_guard lock(root_state_->mutex);
    slot = root_state_->slot_of(DeviceMeshBuilder::ranks_over(*this, dims),
                                fmt::format("mesh_dims_{}", fmt::join(dims, "_")));
  }
  return DeviceMeshBuilder::group_of(*this, slot);  // by_ranks of RootMeshState owns the GroupSlot
}

// If all names are dims of this mesh, the submesh is made from its dims. If some name belongs to a flattened mesh,
// slice_flattened() looks up the dims in the layouts of the root mesh.
MeshPtr DeviceMesh::slice(const std::vector<std::string>& names) const {
  TESSERA_CHECK(!names.empty(), ErrorKind::kShape, "[mesh.slice] {}: found no dim names, wanted at least one of {}.",
                to_string(), quoted_names(dim_names_));
  std::vector<DeviceMeshBuilder::NamedDim> named;
  for (const auto& name : names) named.push_back(DeviceMeshBuilder::named_dim(*this, name));
  if (!std::ranges::all_of(names, [&](const std::string& name) { return has_dim(name); })) {
    return DeviceMeshBuilder::slice_flattened(*this, named);
  }
  std::vector<int64_t> dims;
  for (const auto& name : names) dims.push_back(dim_of(name));
  TESSERA_CHECK(
      std::ranges::is_sorted(dims, std::less_equal<>()), ErrorKind::kShape,
      "[mesh.slice] {}: Invalid mesh_dim_names ({}) specified. Mesh dim indices should be in ascending order.",
      to_string(), quoted_names(names));
  return static_cast<int64_t>(dims.size()) == ndim()
             ? shared_from_this()
             : DeviceMeshBuilder::make_submesh(*this, named, DeviceMeshBuilder::ranks_over(*this, dims));
}

// All meshes that are flattened under one name share the GroupSlot in RootMeshState::by_name, and so one process group.
// by_name also records the dims that were flattened. If one of these dims was made by flatten() itself, the dims that
// it consists of are recorded instead, so that slice() can locate the name in a layout of the root mesh. A rank outside
// the mesh records nothing.
MeshPtr DeviceMesh::flatten(const std::string& name) const {
  if (ndim() == 1 && (name.empty() || (!dim_names_.empty() && dim_names_[0] == name))) return shared_from_this();
  std::string flat_name = name;
  if (flat_name.empty()) {
    for (int64_t dim = 0; dim < ndim(); ++dim) {
      flat_name += (dim == 0 ? "" : "_") + (dim_names_.empty() ? "dim" + std::to_string(dim) : dim_names_[dim]);
    }
  }
  auto mesh = DeviceMeshBuilder::make(world_, device_type_, {size()}, {flat_name}, ranks_);
  DeviceMeshBuilder::add_slots(*mesh);
  DeviceMeshBuilder::register_submesh(*mesh, root_state_);
  std::lock_guard lock(root_state_->mutex);
  const auto& taken = root_state_->layouts.front().names;
  TESSERA_CHECK(std::ranges::find(taken, flat_name) == taken.end(), ErrorKind::kShape,
                "[mesh.flatten] '{}' already exists for submesh of the root mesh, whose dims are ({}). Give the "
                "flattened mesh another name.",
                flat_name, quoted_names(taken));
  if (!coordinate_) return mesh;
  auto& known = root_state_->by_name[flat_name];
  if (!known.slot) {
    known.slot = root_state_->slot_of(ranks_, mesh->slots_[0]->name);
    for (const auto& dim : dim_names_) {
      const auto flat = root_state_->by_name.find(dim);
      const bool is_flat = flat != root_state_->by_name.end() && !flat->second.dims.empty();
      const auto& dims = is_flat ? flat->second.dims : std::vector<std::string>{dim};
      known.dims.insert(known.dims.end(), dims.begin(), dims.end());
    }
  }
  TESSERA_CHECK(known.slot->ranks == ranks_, ErrorKind::kShape,
                "[mesh.flatten] '{}': the name already belongs to a flattened mesh of other ranks. "
                "Give this one another name.",
                flat_name);
  mesh->slots_[0] = known.slot;
  return mesh;
}

std::string DeviceMesh::to_string() const {
  std::string dims;
  for (int64_t dim = 0; dim < ndim(); ++dim) {
    dims += dim == 0 ? "" : ", ";
    dims += dim_names_.empty() ? std::to_string(shape_[dim]) : dim_names_[dim] + "=" + std::to_string(shape_[dim]);
  }
  return "DeviceMesh((" + dims + "), '" + c10::DeviceTypeName(device_type_, /*lower_case=*/true) + "')";
}

// The hashes are compared first, because they differ for almost all unequal meshes.
bool DeviceMesh::operator==(const DeviceMesh& other) const {
  return this == &other || (hash_ == other.hash_ && world_ == other.world_ && device_type_ == other.device_type_ &&
                            shape_ == other.shape_ && ranks_ == other.ranks_ && dim_names_ == other.dim_names_);
}

// The new dims get new GroupSlots; the other dims keep theirs, and so their process groups. The new layout is added to
// RootMeshState::layouts, so that slice() and concatenate() find dims of both the old and the new shape.
MeshPtr DeviceMesh::unflatten(int64_t dim, const std::vector<int64_t>& sizes,
                              const std::vector<std::string>& names) const {
  TESSERA_CHECK(dim >= 0 && dim < ndim(), ErrorKind::kShape, "[mesh.unflatten] {}: found dim {}, wanted 0..{}.",
                to_string(), dim, ndim() - 1);
  int64_t product = 1;
  for (const int64_t size : sizes) {
    TESSERA_CHECK(size > 0, ErrorKind::kShape, "[mesh.unflatten] {}: found size {}, wanted positive sizes.",
                  to_string(), size);
    product *= size;
  }
  TESSERA_CHECK(!sizes.empty() && product == shape_[dim], ErrorKind::kShape,
                "[mesh.unflatten] {}: found sizes [{}] for dim {}, wanted sizes whose product is {}.", to_string(),
                fmt::join(sizes, ", "), dim, shape_[dim]);
  TESSERA_CHECK(names.size() == (dim_names_.empty() ? 0 : sizes.size()), ErrorKind::kShape,
                "[mesh.unflatten] {}: found {} names for {} sizes, wanted {}.", to_string(), names.size(), sizes.size(),
                dim_names_.empty() ? "none, as the mesh has none" : "one for each");
  for (const auto& name : names) {
    const bool own = !dim_names_.empty() && dim_names_[dim] == name;
    TESSERA_CHECK(std::ranges::count(names, name) == 1 && (own || !has_dim(name)), ErrorKind::kShape,
                  "[mesh.unflatten] {}: Each mesh_dim_name must be unique. Found '{}' more than once.", to_string(),
                  name);
  }
  auto shape = shape_;
  shape.erase(shape.begin() + dim);
  shape.insert(shape.begin() + dim, sizes.begin(), sizes.end());
  auto all_names = dim_names_;
  if (!all_names.empty()) {
    all_names.erase(all_names.begin() + dim);
    all_names.insert(all_names.begin() + dim, names.begin(), names.end());
  }
  auto mesh = DeviceMeshBuilder::make(world_, device_type_, shape, all_names, ranks_);
  DeviceMeshBuilder::add_slots(*mesh);
  DeviceMeshBuilder::register_submesh(*mesh, root_state_);
  for (int64_t i = 0; i < mesh->ndim() && mesh->coordinate_; ++i) {
    const auto inner = static_cast<int64_t>(sizes.size());
    if (i < dim || i >= dim + inner) mesh->slots_[i] = slots_[i < dim ? i : i - inner + 1];
  }
  std::lock_guard lock(root_state_->mutex);
  root_state_->layouts.push_back({mesh->shape_, mesh->dim_names_, mesh->ranks_});
  return mesh;
}

}  // namespace tessera
