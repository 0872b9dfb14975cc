#include "tessera/mesh/mesh_builder.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/comm/backends/device_backends.h"

namespace tessera {

namespace {

uint64_t next_mesh_id() {
  static std::atomic<uint64_t> counter{0};
  return ++counter;
}

size_t mix(size_t seed, size_t value) { return seed ^ (value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2)); }

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
    int64_t rest = found - mesh->ranks_.begin();
    for (int64_t dim = mesh->ndim() - 1; dim >= 0; --dim) {
      coordinate[dim] = rest % mesh->shape_[dim];
      rest /= mesh->shape_[dim];
    }
    mesh->coordinate_ = std::move(coordinate);
  }
  size_t hash = mix(std::hash<int>{}(static_cast<int>(device_type)), std::hash<const void*>{}(world.get()));
  for (const int64_t extent : mesh->shape_) hash = mix(hash, static_cast<size_t>(extent));
  for (const int rank : mesh->ranks_) hash = mix(hash, static_cast<size_t>(rank));
  for (const auto& name : mesh->dim_names_) hash = mix(hash, std::hash<std::string>{}(name));
  mesh->hash_ = hash;
  return mesh;
}

std::vector<int> DeviceMeshBuilder::ranks_over(const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) count *= mesh.shape_[dim];
  std::vector<int> ranks(count);
  std::vector<int64_t> at = mesh.coordinate_ ? *mesh.coordinate_ : std::vector<int64_t>(mesh.ndim(), 0);
  for (int64_t flat = 0; flat < count; ++flat) {
    int64_t rest = flat;
    for (size_t i = dims.size(); i-- > 0;) {
      at[dims[i]] = rest % mesh.shape_[dims[i]];
      rest /= mesh.shape_[dims[i]];
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

void DeviceMeshBuilder::split_groups(DeviceMesh& mesh) {
  if (mesh.device_type_ == c10::DeviceType::CPU || mesh.size() != mesh.world_->size()) return;
  if (!comm::device_backend_settings().split_groups) return;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    if (mesh.shape_[dim] == 1 || mesh.shape_[dim] == mesh.size()) continue;
    int64_t part = 0;
    for (int64_t other = 0; other < mesh.ndim(); ++other) {
      if (other != dim) part = part * mesh.shape_[other] + mesh.coordinate_->at(other);
    }
    auto& slot = *mesh.slots_[dim];
    slot.group = mesh.world_->new_group_of_parts(slot.ranks, slot.name, mesh.device_type_, static_cast<int>(part));
  }
}

void DeviceMeshBuilder::join(DeviceMesh& mesh, const std::shared_ptr<DeviceMesh::FlattenedMeshes>& root) {
  mesh.flattened_ = root;
  std::lock_guard lock(root->mutex);
  mesh.id_ = root->ids.try_emplace({mesh.shape_, mesh.ranks_}, mesh.id_).first->second;
}

MeshPtr DeviceMeshBuilder::flatten(const MeshPtr& from, const std::string& name) {
  const auto& root = from->flattened_;
  auto mesh = make(from->world_, from->device_type_, {from->size()}, {name}, from->ranks_);
  add_slots(*mesh);
  join(*mesh, root);
  std::lock_guard lock(root->mutex);
  const auto& taken = root->arrangements.front().names;
  TESSERA_CHECK(std::ranges::find(taken, name) == taken.end(), ErrorKind::kShape,
                "[mesh.flatten] '{}' already exists for submesh of the root mesh, whose dims are ({}). Give the "
                "flattened mesh another name.",
                name, quoted_names(taken));
  if (!mesh->coordinate_) return mesh;
  auto& known = root->by_name[name];
  if (!known.slot) {
    known.slot = root->slot_of(mesh->ranks_, mesh->slots_[0]->name);
    for (const auto& dim : from->dim_names_) {
      const auto flat = root->by_name.find(dim);
      const bool is_flat = flat != root->by_name.end() && !flat->second.dims.empty();
      const auto& dims = is_flat ? flat->second.dims : std::vector<std::string>{dim};
      known.dims.insert(known.dims.end(), dims.begin(), dims.end());
    }
  }
  TESSERA_CHECK(known.slot->ranks == from->ranks_, ErrorKind::kShape,
                "[mesh.flatten] '{}': the name already belongs to a flattened mesh of other ranks. "
                "Give this one another name.",
                name);
  mesh->slots_[0] = known.slot;
  return mesh;
}

std::shared_ptr<DeviceMesh::GroupSlot> DeviceMeshBuilder::flattened_slot(const DeviceMesh& mesh,
                                                                         const std::string& name) {
  std::lock_guard lock(mesh.flattened_->mutex);
  const auto known = mesh.flattened_->by_name.find(name);
  return known == mesh.flattened_->by_name.end() ? nullptr : known->second.slot;
}

MeshPtr DeviceMeshBuilder::slice_flattened(const DeviceMesh& from, const std::vector<std::string>& names) {
  std::vector<std::shared_ptr<DeviceMesh::GroupSlot>> slots;
  std::vector<std::vector<std::string>> dims_of_names;
  std::vector<DeviceMesh::FlattenedMeshes::Arrangement> arrangements;
  for (const auto& name : names) {
    if (auto slot = from.has_dim(name) ? nullptr : flattened_slot(from, name)) {
      std::lock_guard lock(from.flattened_->mutex);
      dims_of_names.push_back(from.flattened_->by_name.at(name).dims);
      slots.push_back(std::move(slot));
    } else {
      slots.push_back(from.slots_.at(from.dim_of(name)));
      dims_of_names.push_back({name});
    }
  }
  std::vector<int64_t> shape;
  for (const auto& slot : slots) shape.push_back(static_cast<int64_t>(slot->ranks.size()));
  const auto finish = [&](std::vector<int> ranks) {
    auto mesh = make(from.world_, from.device_type_, shape, names, std::move(ranks));
    mesh->slots_ = slots;
    join(*mesh, from.flattened_);
    return mesh;
  };
  if (names.size() == 1) return finish(slots[0]->ranks);
  {
    std::lock_guard lock(from.flattened_->mutex);
    arrangements = from.flattened_->arrangements;
  }
  for (const auto& whole : arrangements) {
    const auto all = make(from.world_, from.device_type_, whole.shape, whole.names, whole.ranks);
    std::vector<int64_t> dims;
    bool fits = true;
    for (size_t i = 0; i < names.size() && fits; ++i) {
      std::vector<int64_t> own;
      for (const auto& dim : dims_of_names[i]) {
        fits = fits && all->has_dim(dim);
        own.push_back(fits ? all->dim_of(dim) : 0);
      }
      fits = fits && ranks_over(*all, own) == slots[i]->ranks;
      dims.insert(dims.end(), own.begin(), own.end());
    }
    if (!fits) continue;
    TESSERA_CHECK(std::ranges::is_sorted(dims, std::less_equal<>()), ErrorKind::kShape,
                  "[mesh.slice] {}: Invalid mesh_dim_names ({}) specified. Mesh dim indices should be in ascending "
                  "order, and no dim in two of them; found dims [{}] of the root.",
                  from.to_string(), quoted_names(names), fmt::join(dims, ", "));
    return finish(ranks_over(*all, dims));
  }
  raise(ErrorKind::kShape, "[mesh.slice] {}: ({}) are no dims of one mesh, flattened or not.", from.to_string(),
        quoted_names(names));
}

MeshPtr DeviceMeshBuilder::slice(const MeshPtr& from, const std::vector<int64_t>& dims) {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  for (const int64_t dim : dims) {
    shape.push_back(from->shape_[dim]);
    names.push_back(from->dim_names_[dim]);
  }
  auto mesh = make(from->world_, from->device_type_, std::move(shape), std::move(names), ranks_over(*from, dims));
  for (const int64_t dim : dims) mesh->slots_.push_back(from->slots_[dim]);
  join(*mesh, from->flattened_);
  return mesh;
}

std::shared_ptr<DeviceMesh> DeviceMeshBuilder::root(const std::shared_ptr<comm::World>& world, c10::DeviceType type,
                                                    const std::vector<int64_t>& shape,
                                                    const std::vector<std::string>& names, std::vector<int> ranks) {
  auto mesh = make(world, type, shape, names, std::move(ranks));
  add_slots(*mesh);
  mesh->flattened_ = std::make_shared<DeviceMesh::FlattenedMeshes>();
  mesh->flattened_->arrangements.push_back({mesh->shape_, mesh->dim_names_, mesh->ranks_});
  return mesh;
}

MeshPtr DeviceMeshBuilder::unflatten(const DeviceMesh& from, int64_t dim, const std::vector<int64_t>& sizes,
                                     const std::vector<std::string>& names) {
  auto shape = from.shape_;
  shape.erase(shape.begin() + dim);
  shape.insert(shape.begin() + dim, sizes.begin(), sizes.end());
  auto all_names = from.dim_names_;
  if (!all_names.empty()) {
    all_names.erase(all_names.begin() + dim);
    all_names.insert(all_names.begin() + dim, names.begin(), names.end());
  }
  auto mesh = make(from.world_, from.device_type_, shape, all_names, from.ranks_);
  add_slots(*mesh);
  join(*mesh, from.flattened_);
  for (int64_t i = 0; i < mesh->ndim() && mesh->coordinate_; ++i) {
    const auto inner = static_cast<int64_t>(sizes.size());
    if (i < dim || i >= dim + inner) mesh->slots_[i] = from.slots_[i < dim ? i : i - inner + 1];
  }
  std::lock_guard lock(from.flattened_->mutex);
  from.flattened_->arrangements.push_back({mesh->shape_, mesh->dim_names_, mesh->ranks_});
  return mesh;
}

MeshPtr DeviceMeshBuilder::concatenate(const DeviceMesh& first, const DeviceMesh& second) {
  using Arrangement = DeviceMesh::FlattenedMeshes::Arrangement;
  if (first.flattened_ != second.flattened_ || first.dim_names_.empty() || second.dim_names_.empty()) return nullptr;
  std::vector<Arrangement> arrangements;
  {
    std::lock_guard lock(first.flattened_->mutex);
    arrangements = first.flattened_->arrangements;
  }
  for (const auto& whole : arrangements) {
    std::vector<int64_t> dims;
    std::vector<std::shared_ptr<DeviceMesh::GroupSlot>> slots;
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    for (size_t dim = 0; dim < whole.names.size(); ++dim) {
      const auto& name = whole.names[dim];
      if (!first.has_dim(name) && !second.has_dim(name)) continue;
      const DeviceMesh& owner = first.has_dim(name) ? first : second;
      const int64_t own = owner.dim_of(name);
      if (owner.shape_[own] != whole.shape[dim]) continue;
      dims.push_back(static_cast<int64_t>(dim));
      shape.push_back(whole.shape[dim]);
      names.push_back(name);
      slots.push_back(owner.slots_.at(own));
    }
    if (static_cast<int64_t>(dims.size()) != first.ndim() + second.ndim()) continue;
    const auto all = make(first.world_, first.device_type_, whole.shape, whole.names, whole.ranks);
    auto mesh = make(first.world_, first.device_type_, shape, names, ranks_over(*all, dims));
    mesh->slots_ = std::move(slots);
    join(*mesh, first.flattened_);
    return mesh;
  }
  return nullptr;
}

void DeviceMeshBuilder::use_group(DeviceMesh& mesh, int64_t dim, const std::shared_ptr<comm::Group>& group) {
  TESSERA_CHECK(group->ranks() == mesh.slots_[dim]->ranks, ErrorKind::kShape,
                "[mesh.from_groups] group '{}' for dim {}: found ranks [{}], wanted this rank's row [{}] of {}.",
                group->name(), dim, fmt::join(group->ranks(), ", "), fmt::join(mesh.slots_[dim]->ranks, ", "),
                mesh.to_string());
  mesh.slots_[dim]->group = group;
}

const std::shared_ptr<comm::Group>& DeviceMeshBuilder::group_of(const DeviceMesh& mesh, DeviceMesh::GroupSlot& slot) {
  std::lock_guard lock(slot.mutex);
  if (!slot.group) {
    bool whole_world = static_cast<int>(slot.ranks.size()) == mesh.world_->size();
    for (size_t i = 0; whole_world && i < slot.ranks.size(); ++i) whole_world = slot.ranks[i] == static_cast<int>(i);
    slot.group = whole_world ? mesh.world_->group(mesh.device_type_)
                             : mesh.world_->new_group(slot.ranks, slot.name, mesh.device_type_);
  }
  return slot.group;
}

std::string quoted_names(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += text.empty() ? "'" + name + "'" : ", '" + name + "'";
  return text;
}

}  // namespace tessera
