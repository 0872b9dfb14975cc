#include "tessera/mesh/mesh_builder.h"

#include <c10/util/hash.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/comm/backends/device_backends.h"

namespace tessera {

namespace {

uint64_t next_mesh_id() {
  static std::atomic<uint64_t> counter{0};
  return ++counter;
}

}  // namespace

std::shared_ptr<DeviceMesh> DeviceMeshBuilder::make(const std::shared_ptr<comm::World>& world,
                                                    c10::DeviceType device_type, std::vector<int64_t> shape,
                                                    std::vector<std::string> names, std::vector<int> ranks) {
  std::shared_ptr<DeviceMesh> mesh(new DeviceMesh());
  mesh->world_ = world;
  mesh->device_type_ = device_type;
  mesh->shape_ = std::move(shape);
  mesh->dim_names_ = std::move(names);
  mesh->ranks_ = std::move(ranks);
  mesh->id_ = next_mesh_id();
  const auto found = std::ranges::find(mesh->ranks_, world->rank());
  if (found != mesh->ranks_.end()) {
    std::vector<int64_t> coordinate(mesh->shape_.size());
    int64_t remaining_index = found - mesh->ranks_.begin();
    for (int64_t dim = mesh->ndim() - 1; dim >= 0; --dim) {
      coordinate[dim] = remaining_index % mesh->shape_[dim];
      remaining_index /= mesh->shape_[dim];
    }
    mesh->coordinate_ = std::move(coordinate);
  }
  mesh->hash_ = c10::get_hash(device_type, world.get(), mesh->shape_, mesh->ranks_, mesh->dim_names_);
  return mesh;
}

// Returns the ranks whose coordinates on all dims other than `dims` equal this rank's. They are in the order of their
// coordinates over `dims`, of which the last dim varies fastest. Hence each of these ranks computes the same list.
std::vector<int> DeviceMeshBuilder::ranks_over(const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= mesh.shape_[dim];
  std::vector<int> ranks(count);
  std::vector<int64_t> at = mesh.coordinate_ ? *mesh.coordinate_ : std::vector<int64_t>(mesh.ndim(), 0);
  for (int64_t flat = 0; flat < count; ++flat) {
    int64_t remaining_index = flat;
    for (size_t i = dims.size(); i-- > 0;) {
      at[dims[i]] = remaining_index % mesh.shape_[dims[i]];
      remaining_index /= mesh.shape_[dims[i]];
    }
    int64_t index = 0;
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) index = index * mesh.shape_[dim] + at[dim];
    ranks[flat] = mesh.ranks_[index];
  }
  return ranks;
}

void DeviceMeshBuilder::add_slots(DeviceMesh& mesh) {
  mesh.slots_.resize(mesh.shape_.size());
  if (!mesh.coordinate_) return;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    auto slot = std::make_shared<DeviceMesh::GroupSlot>();
    slot->ranks = ranks_over(mesh, {dim});
    slot->name = "mesh_" + (mesh.dim_names_.empty() ? "dim_" + std::to_string(dim) : mesh.dim_names_[dim]);
    mesh.slots_[dim] = std::move(slot);
  }
}

// new_group_by_split splits the world's communicator, so all ranks of the world must call it together, in the order of
// the dims. `part` is the color of the split: it is equal on ranks that differ only in their coordinate on the dim, and
// these ranks form one group. Dims of size 1, and a dim that spans the world, are skipped.
void DeviceMeshBuilder::split_groups(const DeviceMesh& mesh) {
  if (mesh.device_type_ == c10::DeviceType::CPU || mesh.size() != mesh.world_->size()) return;
  if (!comm::device_backend_settings().split_groups) return;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    if (mesh.shape_[dim] == 1 || mesh.shape_[dim] == mesh.size()) continue;
    int64_t part = 0;
    for (int64_t other = 0; other < mesh.ndim(); ++other) {
      if (other != dim) part = part * mesh.shape_[other] + mesh.coordinate_->at(other);
    }
    auto& slot = *mesh.slots_[dim];
    slot.group = mesh.world_->new_group_by_split(slot.ranks, slot.name, mesh.device_type_, static_cast<int>(part));
  }
}

// Submeshes with equal shape and ranks get the same id, so that caches with mesh ids in their keys find the entries of
// an equal submesh that was made before.
void DeviceMeshBuilder::register_submesh(DeviceMesh& mesh, const std::shared_ptr<DeviceMesh::RootMeshState>& root) {
  mesh.root_state_ = root;
  std::lock_guard lock(root->mutex);
  mesh.id_ = root->ids.try_emplace({mesh.shape_, mesh.ranks_}, mesh.id_).first->second;
}

MeshPtr DeviceMeshBuilder::make_root(const std::shared_ptr<comm::World>& world, c10::DeviceType type,
                                     const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                                     std::vector<int> ranks) {
  auto mesh = make(world, type, shape, names, std::move(ranks));
  add_slots(*mesh);
  mesh->root_state_ = std::make_shared<DeviceMesh::RootMeshState>();
  mesh->root_state_->layouts.push_back({mesh->shape_, mesh->dim_names_, mesh->ranks_});
  return mesh;
}

DeviceMeshBuilder::NamedDim DeviceMeshBuilder::named_dim(const DeviceMesh& mesh, const std::string& name) {
  if (!mesh.has_dim(name)) {
    std::lock_guard lock(mesh.root_state_->mutex);
    const auto known = mesh.root_state_->by_name.find(name);
    if (known != mesh.root_state_->by_name.end()) {
      const auto& [slot, dims] = known->second;
      return {.name = name, .size = static_cast<int64_t>(slot->ranks.size()), .slot = slot, .dims = dims};
    }
  }
  const int64_t dim = mesh.dim_of(name);
  return {.name = name, .size = mesh.shape_[dim], .slot = mesh.slots_.at(dim), .dims = {name}};
}

MeshPtr DeviceMeshBuilder::make_submesh(const DeviceMesh& from, const std::vector<NamedDim>& dims,
                                        std::vector<int> ranks) {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  for (const auto& dim : dims) {
    shape.push_back(dim.size);
    names.push_back(dim.name);
  }
  auto mesh = make(from.world_, from.device_type_, std::move(shape), std::move(names), std::move(ranks));
  for (const auto& dim : dims) mesh->slots_.push_back(dim.slot);
  register_submesh(*mesh, from.root_state_);
  return mesh;
}

namespace {

// Each entry of `dims` is one dim or a flattened dim, which consists of several (NamedDim::dims). Returns the indices
// in mesh `all` of the dims of all entries, in the order of `dims`. Returns nullopt if `all` lacks a dim of an entry,
// or if an entry has other ranks than its dims have in `all`. A rank outside the mesh does not have the ranks of an
// entry and compares only their number.
std::optional<std::vector<int64_t>> find_dims(const DeviceMesh& all,
                                              const std::vector<DeviceMeshBuilder::NamedDim>& dims) {
  std::vector<int64_t> within;
  for (const auto& dim : dims) {
    std::vector<int64_t> own;
    for (const auto& name : dim.dims) {
      if (!all.has_dim(name)) return std::nullopt;
      own.push_back(all.dim_of(name));
    }
    const auto ranks = DeviceMeshBuilder::ranks_over(all, own);
    if (dim.slot ? ranks != dim.slot->ranks : static_cast<int64_t>(ranks.size()) != dim.size) return std::nullopt;
    within.insert(within.end(), own.begin(), own.end());
  }
  return within;
}

}  // namespace

std::vector<DeviceMesh::RootMeshState::MeshLayout> DeviceMeshBuilder::layouts_of(const DeviceMesh& mesh) {
  std::lock_guard lock(mesh.root_state_->mutex);
  return mesh.root_state_->layouts;
}

// A dim that flatten() made stands for the dims that were flattened (NamedDim::dims). This function takes the first
// layout of the root mesh (its shape, or one that unflatten() added) that has the dims for which the requested `dims`
// stand, and takes the ranks of the submesh from this layout. The requested dims must have the order of the layout, and
// no dim of the layout may belong to two requested dims. For a single requested dim, the ranks of this dim are used
// without a layout.
MeshPtr DeviceMeshBuilder::slice_flattened(const DeviceMesh& from, const std::vector<NamedDim>& dims) {
  if (dims.size() == 1) return make_submesh(from, dims, dims[0].slot->ranks);
  std::vector<std::string> names;
  for (const auto& dim : dims) names.push_back(dim.name);
  for (const auto& whole : layouts_of(from)) {
    const auto all = make(from.world_, from.device_type_, whole.shape, whole.names, whole.ranks);
    const auto within = find_dims(*all, dims);
    if (!within) continue;
    TESSERA_CHECK(std::ranges::is_sorted(*within, std::less_equal<>()), ErrorKind::kShape,
                  "[mesh.slice] {}: Invalid mesh_dim_names ({}) specified. Mesh dim indices should be in ascending "
                  "order, and no dim in two of them; found dims [{}] of the root.",
                  from.to_string(), quoted_names(names), fmt::join(*within, ", "));
    return make_submesh(from, dims, ranks_over(*all, *within));
  }
  raise(ErrorKind::kShape,
        "[mesh.slice] {}: the dims ({}) do not all belong to one shape of the root mesh. Use dims of the root, or of "
        "one mesh that unflatten() made.",
        from.to_string(), quoted_names(names));
}

// Searches the layouts of the root mesh (RootMeshState::layouts: the shape of the root mesh and the shapes that
// unflatten() added) for the first one that contains the dims of both meshes. The result has these dims, in the order
// of this layout.
MeshPtr DeviceMeshBuilder::concatenate(const DeviceMesh& first, const DeviceMesh& second) {
  if (first.root_state_ != second.root_state_ || first.dim_names_.empty() || second.dim_names_.empty()) return nullptr;
  std::vector<NamedDim> dims;
  for (const DeviceMesh* mesh : {&first, &second}) {
    for (const auto& name : mesh->dim_names_) dims.push_back(named_dim(*mesh, name));
  }
  for (const auto& whole : layouts_of(first)) {
    const auto all = make(first.world_, first.device_type_, whole.shape, whole.names, whole.ranks);
    auto within = find_dims(*all, dims);
    if (!within) continue;
    std::ranges::sort(dims, {}, [&](const NamedDim& dim) { return all->dim_of(dim.name); });
    std::ranges::sort(*within);
    return make_submesh(first, dims, ranks_over(*all, *within));
  }
  return nullptr;
}

void DeviceMeshBuilder::set_group(const DeviceMesh& mesh, int64_t dim, const std::shared_ptr<comm::Group>& group) {
  TESSERA_CHECK(group->ranks() == mesh.slots_[dim]->ranks, ErrorKind::kShape,
                "[mesh.from_groups] group '{}' for dim {}: found ranks [{}], wanted this rank's row [{}] of {}.",
                group->name(), dim, fmt::join(group->ranks(), ", "), fmt::join(mesh.slots_[dim]->ranks, ", "),
                mesh.to_string());
  mesh.slots_[dim]->group = group;
}

// Returns the process group of `slot`, and creates the group at the first call. GroupSlot::mutex ensures that the group
// is created only once, also if several meshes share the GroupSlot. For all ranks of the world in order, the world's
// own group is used.
const std::shared_ptr<comm::Group>& DeviceMeshBuilder::group_of(const DeviceMesh& mesh,
                                                                const std::shared_ptr<DeviceMesh::GroupSlot>& slot) {
  TESSERA_CHECK(mesh.coordinate_.has_value(), ErrorKind::kShape,
                "[mesh.group] {}: rank {} is not part of the mesh and has no group on it.", mesh.to_string(),
                mesh.rank());
  std::lock_guard lock(slot->mutex);
  if (!slot->group) {
    bool whole_world = static_cast<int>(slot->ranks.size()) == mesh.world_->size();
    for (size_t i = 0; whole_world && i < slot->ranks.size(); ++i) whole_world = slot->ranks[i] == static_cast<int>(i);
    slot->group = whole_world ? mesh.world_->group(mesh.device_type_)
                              : mesh.world_->new_group(slot->ranks, slot->name, mesh.device_type_);
  }
  return slot->group;
}

std::string quoted_names(const std::vector<std::string>& names) {
  return names.empty() ? "" : fmt::format("'{}'", fmt::join(names, "', '"));
}

}  // namespace tessera
