#include "tessera/mesh/device_mesh.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>

#include "tessera/base/error.h"

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
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<GroupSlot>> by_name;
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

namespace {

uint64_t next_mesh_id() {
  static std::atomic<uint64_t> counter{0};
  return ++counter;
}

size_t mix(size_t seed, size_t value) { return seed ^ (value + 0x9e3779b97f4a7c15ULL + (seed << 6) + (seed >> 2)); }

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) {
    text += text.empty() ? "'" + name + "'" : ", '" + name + "'";
  }
  return text;
}

}  // namespace

struct DeviceMeshBuilder {
  static std::shared_ptr<DeviceMesh> make(const std::shared_ptr<comm::World>& world, c10::DeviceType device_type,
                                          std::vector<int64_t> shape, std::vector<std::string> names,
                                          std::vector<int> ranks) {
    std::shared_ptr<DeviceMesh> mesh(new DeviceMesh());
    mesh->world_ = world;
    mesh->device_type_ = device_type;
    mesh->shape_ = std::move(shape);
    mesh->dim_names_ = std::move(names);
    mesh->ranks_ = std::move(ranks);
    mesh->id_ = next_mesh_id();
    const auto found = std::find(mesh->ranks_.begin(), mesh->ranks_.end(), world->rank());
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
    for (const int64_t extent : mesh->shape_) {
      hash = mix(hash, static_cast<size_t>(extent));
    }
    for (const int rank : mesh->ranks_) {
      hash = mix(hash, static_cast<size_t>(rank));
    }
    for (const auto& name : mesh->dim_names_) {
      hash = mix(hash, std::hash<std::string>{}(name));
    }
    mesh->hash_ = hash;
    return mesh;
  }

  // The ranks that differ from this one on the given dims only, row-major. On a rank outside the mesh: at the origin of
  // the other dims.
  static std::vector<int> ranks_over(const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
    int64_t count = 1;
    for (const int64_t dim : dims) {
      count *= mesh.shape_[dim];
    }
    std::vector<int> ranks(count);
    std::vector<int64_t> at = mesh.coordinate_ ? *mesh.coordinate_ : std::vector<int64_t>(mesh.ndim(), 0);
    for (int64_t flat = 0; flat < count; ++flat) {
      int64_t rest = flat;
      for (size_t i = dims.size(); i-- > 0;) {
        at[dims[i]] = rest % mesh.shape_[dims[i]];
        rest /= mesh.shape_[dims[i]];
      }
      int64_t index = 0;
      for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
        index = index * mesh.shape_[dim] + at[dim];
      }
      ranks[flat] = mesh.ranks_[index];
    }
    return ranks;
  }

  // Slots along each dim for the row that holds this rank.
  static void add_slots(DeviceMesh& mesh) {
    mesh.slots_.resize(mesh.shape_.size());
    if (!mesh.coordinate_) {
      return;
    }
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
      auto slot = std::make_shared<DeviceMesh::GroupSlot>();
      slot->ranks = ranks_over(mesh, {dim});
      slot->name = "mesh_" + (mesh.dim_names_.empty() ? "dim_" + std::to_string(dim) : mesh.dim_names_[dim]);
      mesh.slots_[dim] = std::move(slot);
    }
  }

  // Makes `mesh` a submesh. One made again has the id of the first.
  static void join(DeviceMesh& mesh, const std::shared_ptr<DeviceMesh::FlattenedMeshes>& root) {
    mesh.flattened_ = root;
    std::lock_guard lock(root->mutex);
    mesh.id_ = root->ids.try_emplace({mesh.shape_, mesh.ranks_}, mesh.id_).first->second;
  }

  static MeshPtr flatten(const MeshPtr& from, const std::string& name) {
    auto mesh = make(from->world_, from->device_type_, {from->size()}, {name}, from->ranks_);
    add_slots(*mesh);
    join(*mesh, from->flattened_);
    if (!mesh->coordinate_) {
      return mesh;
    }
    std::lock_guard lock(from->flattened_->mutex);
    auto& slot = from->flattened_->by_name[name];
    if (!slot) {
      slot = from->flattened_->slot_of(mesh->ranks_, mesh->slots_[0]->name);
      mesh->slots_[0] = slot;
    } else {
      TESSERA_CHECK(slot->ranks == from->ranks_, ErrorKind::kShape,
                    "[mesh.flatten] '{}': the name already belongs to a flattened mesh of other ranks. "
                    "Give this one another name.",
                    name);
      mesh->slots_[0] = slot;
    }
    return mesh;
  }

  // The mesh that flatten(name) once made; null when there is none.
  static MeshPtr find_flattened(const DeviceMesh& root, const std::string& name) {
    std::shared_ptr<DeviceMesh::GroupSlot> slot;
    {
      std::lock_guard lock(root.flattened_->mutex);
      const auto known = root.flattened_->by_name.find(name);
      if (known == root.flattened_->by_name.end()) {
        return nullptr;
      }
      slot = known->second;
    }
    auto mesh = make(root.world_, root.device_type_, {static_cast<int64_t>(slot->ranks.size())}, {name}, slot->ranks);
    mesh->slots_.push_back(slot);
    join(*mesh, root.flattened_);
    return mesh;
  }

  static MeshPtr slice(const MeshPtr& from, const std::vector<int64_t>& dims) {
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    for (const int64_t dim : dims) {
      shape.push_back(from->shape_[dim]);
      names.push_back(from->dim_names_[dim]);
    }
    auto mesh = make(from->world_, from->device_type_, std::move(shape), std::move(names), ranks_over(*from, dims));
    for (const int64_t dim : dims) {
      mesh->slots_.push_back(from->slots_[dim]);
    }
    join(*mesh, from->flattened_);
    return mesh;
  }

  static std::shared_ptr<DeviceMesh> root(const std::shared_ptr<comm::World>& world, c10::DeviceType type,
                                          const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                                          std::vector<int> ranks) {
    auto mesh = make(world, type, shape, names, std::move(ranks));
    add_slots(*mesh);
    mesh->flattened_ = std::make_shared<DeviceMesh::FlattenedMeshes>();
    mesh->flattened_->arrangements.push_back({mesh->shape_, mesh->dim_names_, mesh->ranks_});
    return mesh;
  }

  static MeshPtr unflatten(const DeviceMesh& from, int64_t dim, const std::vector<int64_t>& sizes,
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
      if (i < dim || i >= dim + inner) {
        mesh->slots_[i] = from.slots_[i < dim ? i : i - inner + 1];
      }
    }
    std::lock_guard lock(from.flattened_->mutex);
    from.flattened_->arrangements.push_back({mesh->shape_, mesh->dim_names_, mesh->ranks_});
    return mesh;
  }

  // The slice of an arrangement of the same ranks that has the dims of both; null when there is none.
  static MeshPtr concatenate(const DeviceMesh& first, const DeviceMesh& second) {
    using Arrangement = DeviceMesh::FlattenedMeshes::Arrangement;
    if (first.flattened_ != second.flattened_ || first.dim_names_.empty() || second.dim_names_.empty()) {
      return nullptr;
    }
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
        if (!first.has_dim(name) && !second.has_dim(name)) {
          continue;
        }
        const DeviceMesh& owner = first.has_dim(name) ? first : second;
        const int64_t own = owner.dim_of(name);
        if (owner.shape_[own] != whole.shape[dim]) {
          continue;
        }
        dims.push_back(static_cast<int64_t>(dim));
        shape.push_back(whole.shape[dim]);
        names.push_back(name);
        slots.push_back(owner.slots_.at(own));
      }
      if (static_cast<int64_t>(dims.size()) != first.ndim() + second.ndim()) {
        continue;
      }
      const auto all = make(first.world_, first.device_type_, whole.shape, whole.names, whole.ranks);
      auto mesh = make(first.world_, first.device_type_, shape, names, ranks_over(*all, dims));
      mesh->slots_ = std::move(slots);
      join(*mesh, first.flattened_);
      return mesh;
    }
    return nullptr;
  }

  static void use_group(DeviceMesh& mesh, int64_t dim, const std::shared_ptr<comm::Group>& group) {
    TESSERA_CHECK(group->ranks() == mesh.slots_[dim]->ranks, ErrorKind::kShape,
                  "[mesh.from_groups] group '{}' for dim {}: found ranks [{}], wanted this rank's row [{}] of {}.",
                  group->name(), dim, fmt::join(group->ranks(), ", "), fmt::join(mesh.slots_[dim]->ranks, ", "),
                  mesh.to_string());
    mesh.slots_[dim]->group = group;
  }

  static const std::shared_ptr<comm::Group>& group_of(const DeviceMesh& mesh, DeviceMesh::GroupSlot& slot) {
    std::lock_guard lock(slot.mutex);
    if (!slot.group) {
      bool whole_world = static_cast<int>(slot.ranks.size()) == mesh.world_->size();
      for (size_t i = 0; whole_world && i < slot.ranks.size(); ++i) {
        whole_world = slot.ranks[i] == static_cast<int>(i);
      }
      slot.group = whole_world ? mesh.world_->group(mesh.device_type_)
                               : mesh.world_->new_group(slot.ranks, slot.name, mesh.device_type_);
    }
    return slot.group;
  }
};

int64_t DeviceMesh::size() const { return static_cast<int64_t>(ranks_.size()); }

int DeviceMesh::rank() const { return world_->rank(); }

c10::Device DeviceMesh::device() const {
  if (device_type_ == c10::DeviceType::CPU) {
    return c10::Device(c10::DeviceType::CPU);
  }
  return c10::Device(device_type_, static_cast<c10::DeviceIndex>(world_->device_index()));
}

int64_t DeviceMesh::local_rank(int64_t dim) const {
  TESSERA_CHECK(coordinate_.has_value(), ErrorKind::kShape,
                "[mesh.local_rank] {}: rank {} is not part of the mesh. "
                "Ask for coordinate() first.",
                to_string(), rank());
  TESSERA_CHECK(dim >= 0 && dim < ndim(), ErrorKind::kShape, "[mesh.local_rank] {}: found dim {}, wanted 0..{}.",
                to_string(), dim, ndim() - 1);
  return (*coordinate_)[dim];
}

bool DeviceMesh::has_dim(const std::string& name) const {
  return std::find(dim_names_.begin(), dim_names_.end(), name) != dim_names_.end();
}

int64_t DeviceMesh::dim_of(const std::string& name) const {
  TESSERA_CHECK(
      !dim_names_.empty(), ErrorKind::kShape,
      "[mesh.slice] {}: asked for dim '{}'. Cannot slice a DeviceMesh without mesh_dim_names! Give dim_names to "
      "init_device_mesh.",
      to_string(), name);
  const auto found = std::find(dim_names_.begin(), dim_names_.end(), name);
  TESSERA_CHECK(found != dim_names_.end(), ErrorKind::kShape,
                "[mesh.slice] {}: Invalid mesh_dim_names ('{}') specified. Valid mesh_dim_names are ({}).", to_string(),
                name, join(dim_names_));
  return found - dim_names_.begin();
}

const std::shared_ptr<comm::Group>& DeviceMesh::group(int64_t dim) const {
  TESSERA_CHECK(dim >= 0 && dim < ndim(), ErrorKind::kShape, "[mesh.group] {}: found dim {}, wanted 0..{}.",
                to_string(), dim, ndim() - 1);
  TESSERA_CHECK(coordinate_.has_value(), ErrorKind::kShape,
                "[mesh.group] {}: rank {} is not part of the mesh and has no group on it.", to_string(), rank());
  return DeviceMeshBuilder::group_of(*this, *slots_[dim]);
}

const std::shared_ptr<comm::Group>& DeviceMesh::group(const std::vector<int64_t>& dims) const {
  if (dims.size() == 1) {
    return group(dims[0]);
  }
  TESSERA_CHECK(!dims.empty() && std::is_sorted(dims.begin(), dims.end(), std::less_equal<>()) && dims.front() >= 0 &&
                    dims.back() < ndim(),
                ErrorKind::kShape, "[mesh.group] {}: found dims [{}], wanted some of 0..{} in ascending order.",
                to_string(), fmt::join(dims, ", "), ndim() - 1);
  TESSERA_CHECK(coordinate_.has_value(), ErrorKind::kShape,
                "[mesh.group] {}: rank {} is not part of the mesh and has no group on it.", to_string(), rank());
  std::shared_ptr<GroupSlot> slot;
  {
    std::lock_guard lock(flattened_->mutex);
    slot = flattened_->slot_of(DeviceMeshBuilder::ranks_over(*this, dims),
                               fmt::format("mesh_dims_{}", fmt::join(dims, "_")));
  }
  return DeviceMeshBuilder::group_of(*this, *slot);  // the slot lives as long as the root's table
}

MeshPtr DeviceMesh::slice(const std::vector<std::string>& names) const {
  TESSERA_CHECK(!names.empty(), ErrorKind::kShape, "[mesh.slice] {}: found no dim names, wanted at least one of {}.",
                to_string(), join(dim_names_));
  if (names.size() == 1 && !has_dim(names[0])) {
    if (auto mesh = DeviceMeshBuilder::find_flattened(*this, names[0])) {
      return mesh;
    }
  }
  std::vector<int64_t> dims;
  for (const auto& name : names) {
    dims.push_back(dim_of(name));
    TESSERA_CHECK(
        dims.size() < 2 || dims[dims.size() - 2] < dims.back(), ErrorKind::kShape,
        "[mesh.slice] {}: Invalid mesh_dim_names ({}) specified. Mesh dim indices should be in ascending order.",
        to_string(), join(names));
  }
  const auto self = shared_from_this();
  return static_cast<int64_t>(dims.size()) == ndim() ? self : DeviceMeshBuilder::slice(self, dims);
}

MeshPtr DeviceMesh::flatten(const std::string& name) const {
  const auto self = shared_from_this();
  if (ndim() == 1 && (name.empty() || (!dim_names_.empty() && dim_names_[0] == name))) {
    return self;
  }
  std::string flat_name = name;
  if (flat_name.empty()) {
    for (int64_t dim = 0; dim < ndim(); ++dim) {
      flat_name += (dim == 0 ? "" : "_") + (dim_names_.empty() ? "dim" + std::to_string(dim) : dim_names_[dim]);
    }
  }
  return DeviceMeshBuilder::flatten(self, flat_name);
}

std::string DeviceMesh::to_string() const {
  std::string dims;
  for (int64_t dim = 0; dim < ndim(); ++dim) {
    dims += dim == 0 ? "" : ", ";
    dims += dim_names_.empty() ? std::to_string(shape_[dim]) : dim_names_[dim] + "=" + std::to_string(shape_[dim]);
  }
  return "DeviceMesh((" + dims + "), '" + c10::DeviceTypeName(device_type_, /*lower_case=*/true) + "')";
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  return this == &other || (hash_ == other.hash_ && world_ == other.world_ && device_type_ == other.device_type_ &&
                            shape_ == other.shape_ && ranks_ == other.ranks_ && dim_names_ == other.dim_names_);
}

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
    TESSERA_CHECK(std::count(names.begin(), names.end(), name) == 1 && (own || !has_dim(name)), ErrorKind::kShape,
                  "[mesh.unflatten] {}: Each mesh_dim_name must be unique. Found '{}' more than once.", to_string(),
                  name);
  }
  return DeviceMeshBuilder::unflatten(*this, dim, sizes, names);
}

namespace {

c10::DeviceType checked_type(const std::string& device_type) {
  TESSERA_CHECK(
      device_type.find(':') == std::string::npos, ErrorKind::kShape,
      "[mesh.init] Device type with index is not supported but got {}. Each rank uses the device of its local rank.",
      device_type);
  TESSERA_CHECK(device_type == "cpu" || device_type == "cuda", ErrorKind::kShape,
                "[mesh.init] device type: found '{}', wanted 'cpu' or 'cuda'.", device_type);
  return device_type == "cpu" ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
}

// Number of ranks.
int64_t checked_shape(const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names, int64_t most) {
  TESSERA_CHECK(!shape.empty(), ErrorKind::kShape, "[mesh.init] shape: found no dims, wanted at least one.");
  TESSERA_CHECK(dim_names.empty() || dim_names.size() == shape.size(), ErrorKind::kShape,
                "[mesh.init] mesh_shape and mesh_dim_names should have same length! Found {} names for {} dims.",
                dim_names.size(), shape.size());
  for (const auto& name : dim_names) {
    TESSERA_CHECK(std::count(dim_names.begin(), dim_names.end(), name) == 1, ErrorKind::kShape,
                  "[mesh.init] Each mesh_dim_name must be unique. Found '{}' more than once in {}.", name,
                  join(dim_names));
  }
  int64_t count = 1;
  for (const int64_t extent : shape) {
    TESSERA_CHECK(extent > 0, ErrorKind::kShape, "[mesh.init] shape: found {}, wanted positive sizes.", extent);
    TESSERA_CHECK(
        count <= most / extent, ErrorKind::kShape,
        "[mesh.init] Mesh should not be bigger than default world size {}, but found shape {}. Start more ranks or "
        "shrink the mesh.",
        most, fmt::join(shape, "x"));
    count *= extent;
  }
  return count;
}

}  // namespace

MeshPtr init_device_mesh(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names) {
  const auto type = checked_type(device_type);
  std::vector<int> ranks(checked_shape(shape, dim_names, world->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return DeviceMeshBuilder::root(world, type, shape, dim_names, std::move(ranks));
}

namespace {

std::shared_ptr<DeviceMesh> arrange(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                                    const std::vector<int>& ranks, const std::vector<int64_t>& shape,
                                    const std::vector<std::string>& dim_names) {
  const auto type = checked_type(device_type);
  const int64_t count = checked_shape(shape, dim_names, world->size());
  TESSERA_CHECK(count == static_cast<int64_t>(ranks.size()), ErrorKind::kShape,
                "[mesh.init] ranks: found {} of them for shape {}, wanted {}.", ranks.size(), fmt::join(shape, "x"),
                count);
  std::vector<bool> seen(world->size(), false);
  for (const int rank : ranks) {
    TESSERA_CHECK(rank >= 0 && rank < world->size(), ErrorKind::kShape,
                  "[mesh.init] ranks: found {}, wanted ranks of the world, 0..{}.", rank, world->size() - 1);
    TESSERA_CHECK(!seen[rank], ErrorKind::kShape, "[mesh.init] ranks: found {} more than once, wanted each rank once.",
                  rank);
    seen[rank] = true;
  }
  return DeviceMeshBuilder::root(world, type, shape, dim_names, ranks);
}

}  // namespace

MeshPtr make_device_mesh(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<int>& ranks, const std::vector<int64_t>& shape,
                         const std::vector<std::string>& dim_names) {
  return arrange(world, device_type, ranks, shape, dim_names);
}

MeshPtr mesh_from_groups(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<std::shared_ptr<comm::Group>>& groups, const std::vector<int>& ranks,
                         const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names) {
  TESSERA_CHECK(
      !groups.empty() && std::none_of(groups.begin(), groups.end(), [](const auto& g) { return g == nullptr; }),
      ErrorKind::kShape, "[mesh.from_groups] groups: found none, or an empty one, wanted one for each mesh dim.");
  TESSERA_CHECK(
      groups.size() == 1 || (!ranks.empty() && shape.size() == groups.size()), ErrorKind::kShape,
      "[mesh.from_groups] found {} groups and a shape of {} dims: Must pass mesh if passing multiple ProcessGroups. "
      "Give ranks and a shape with one dim for each group.",
      groups.size(), shape.size());
  const bool one = groups.size() == 1 && ranks.empty();
  const auto mesh = arrange(world, device_type, one ? groups[0]->ranks() : ranks,
                            one ? std::vector<int64_t>{groups[0]->size()} : shape, dim_names);
  TESSERA_CHECK(mesh->coordinate().has_value(), ErrorKind::kShape,
                "[mesh.from_groups] {}: rank {} is not part of the mesh and can have no group of it.",
                mesh->to_string(), world->rank());
  for (size_t dim = 0; dim < groups.size(); ++dim) {
    DeviceMeshBuilder::use_group(*mesh, static_cast<int64_t>(dim), groups[dim]);
  }
  return mesh;
}

MeshPtr concatenate(const MeshPtr& first, const MeshPtr& second) {
  for (const auto& name : first->dim_names()) {
    TESSERA_CHECK(!second->has_dim(name), ErrorKind::kShape, "[mesh.concatenate] {} and {} both have the dim '{}'.",
                  first->to_string(), second->to_string(), name);
  }
  auto mesh = DeviceMeshBuilder::concatenate(*first, *second);
  TESSERA_CHECK(mesh != nullptr, ErrorKind::kShape,
                "[mesh.concatenate] {} and {} are no slices of one mesh with named dims. Slice both from one mesh that "
                "init_device_mesh made.",
                first->to_string(), second->to_string());
  return mesh;
}

}  // namespace tessera
