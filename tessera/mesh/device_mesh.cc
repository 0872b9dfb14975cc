#include "tessera/mesh/device_mesh.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <numeric>

#include <fmt/ranges.h>

#include "tessera/base/error.h"

namespace tessera {

// One group along one dim, made when first asked for and shared by every mesh that holds the dim.
struct DeviceMesh::GroupSlot {
  std::mutex mutex;
  std::vector<int> ranks;
  std::string name;
  std::shared_ptr<comm::Group> group;
};

// The groups of meshes made by flatten(), by name. Meshes own this, so it must not own meshes.
struct DeviceMesh::FlattenedMeshes {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<GroupSlot>> by_name;
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

  // Slots along each dim for the row that holds this rank.
  static void add_slots(DeviceMesh& mesh) {
    mesh.slots_.resize(mesh.shape_.size());
    if (!mesh.coordinate_) {
      return;
    }
    for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
      auto slot = std::make_shared<DeviceMesh::GroupSlot>();
      int64_t stride = 1;
      for (int64_t inner = dim + 1; inner < mesh.ndim(); ++inner) {
        stride *= mesh.shape_[inner];
      }
      int64_t start = 0;
      int64_t inner_stride = 1;
      for (int64_t other = mesh.ndim() - 1; other >= 0; --other) {
        start += other == dim ? 0 : (*mesh.coordinate_)[other] * inner_stride;
        inner_stride *= mesh.shape_[other];
      }
      for (int64_t i = 0; i < mesh.shape_[dim]; ++i) {
        slot->ranks.push_back(mesh.ranks_[start + i * stride]);
      }
      slot->name = "mesh_" + (mesh.dim_names_.empty() ? "dim_" + std::to_string(dim) : mesh.dim_names_[dim]);
      mesh.slots_[dim] = std::move(slot);
    }
  }

  static MeshPtr flatten(const MeshPtr& from, const std::string& name) {
    auto mesh = make(from->world_, from->device_type_, {from->size()}, {name}, from->ranks_);
    add_slots(*mesh);
    mesh->flattened_ = from->flattened_;
    std::lock_guard lock(from->flattened_->mutex);
    auto& slot = from->flattened_->by_name[name];
    if (!mesh->coordinate_) {
      return mesh;
    }
    if (!slot) {
      slot = mesh->slots_[0];
    } else {
      TESSERA_CHECK(slot->ranks == from->ranks_, ErrorKind::kShape,
                    "[mesh.flatten] '{}': the name already belongs to a flattened mesh of other ranks. "
                    "Give this one another name.", name);
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
    mesh->flattened_ = root.flattened_;
    return mesh;
  }

  static MeshPtr slice(const MeshPtr& from, const std::vector<int64_t>& dims) {
    std::vector<int64_t> shape;
    std::vector<std::string> names;
    for (const int64_t dim : dims) {
      shape.push_back(from->shape_[dim]);
      names.push_back(from->dim_names_[dim]);
    }
    const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    std::vector<int> ranks(count);
    for (int64_t flat = 0; flat < count; ++flat) {
      // A rank outside the mesh sees the submesh at the origin of the other dims.
      std::vector<int64_t> at = from->coordinate_ ? *from->coordinate_ : std::vector<int64_t>(from->ndim(), 0);
      int64_t rest = flat;
      for (size_t i = dims.size(); i-- > 0;) {
        at[dims[i]] = rest % shape[i];
        rest /= shape[i];
      }
      int64_t index = 0;
      for (int64_t dim = 0; dim < from->ndim(); ++dim) {
        index = index * from->shape_[dim] + at[dim];
      }
      ranks[flat] = from->ranks_[index];
    }
    auto mesh = make(from->world_, from->device_type_, std::move(shape), std::move(names), std::move(ranks));
    for (const int64_t dim : dims) {
      mesh->slots_.push_back(from->slots_[dim]);
    }
    mesh->flattened_ = from->flattened_;
    return mesh;
  }

  static MeshPtr root(const std::shared_ptr<comm::World>& world, c10::DeviceType type, const std::vector<int64_t>& shape,
                      const std::vector<std::string>& names, int64_t count) {
    std::vector<int> ranks(count);
    std::iota(ranks.begin(), ranks.end(), 0);
    auto mesh = make(world, type, shape, names, std::move(ranks));
    add_slots(*mesh);
    mesh->flattened_ = std::make_shared<DeviceMesh::FlattenedMeshes>();
    return mesh;
  }
};

int64_t DeviceMesh::size() const { return static_cast<int64_t>(ranks_.size()); }

int DeviceMesh::rank() const { return world_->rank(); }

c10::Device DeviceMesh::device() const {
  if (device_type_ == c10::DeviceType::CPU) {
    return c10::Device(c10::DeviceType::CPU);
  }
  return c10::Device(device_type_, static_cast<c10::DeviceIndex>(world_->info().local_rank));
}

int64_t DeviceMesh::local_rank(int64_t dim) const {
  TESSERA_CHECK(coordinate_.has_value(), ErrorKind::kShape, "[mesh.local_rank] {}: rank {} is not part of the mesh. "
                "Ask for coordinate() first.", to_string(), rank());
  TESSERA_CHECK(dim >= 0 && dim < ndim(), ErrorKind::kShape, "[mesh.local_rank] {}: found dim {}, wanted 0..{}.",
                to_string(), dim, ndim() - 1);
  return (*coordinate_)[dim];
}

bool DeviceMesh::has_dim(const std::string& name) const {
  return std::find(dim_names_.begin(), dim_names_.end(), name) != dim_names_.end();
}

int64_t DeviceMesh::dim_of(const std::string& name) const {
  TESSERA_CHECK(!dim_names_.empty(), ErrorKind::kShape,
                "[mesh.dim] {}: asked for dim '{}' of a mesh without names. Give dim_names to init_device_mesh.",
                to_string(), name);
  const auto found = std::find(dim_names_.begin(), dim_names_.end(), name);
  TESSERA_CHECK(found != dim_names_.end(), ErrorKind::kShape,
                "[mesh.dim] {}: found no dim '{}', wanted one of {}. Check the name.", to_string(), name,
                join(dim_names_));
  return found - dim_names_.begin();
}

const std::shared_ptr<comm::Group>& DeviceMesh::group(int64_t dim) const {
  TESSERA_CHECK(dim >= 0 && dim < ndim(), ErrorKind::kShape, "[mesh.group] {}: found dim {}, wanted 0..{}.",
                to_string(), dim, ndim() - 1);
  TESSERA_CHECK(coordinate_.has_value(), ErrorKind::kShape,
                "[mesh.group] {}: rank {} is not part of the mesh and has no group on it.", to_string(), rank());
  GroupSlot& slot = *slots_[dim];
  std::lock_guard lock(slot.mutex);
  if (!slot.group) {
    bool whole_world = static_cast<int>(slot.ranks.size()) == world_->size();
    for (size_t i = 0; whole_world && i < slot.ranks.size(); ++i) {
      whole_world = slot.ranks[i] == static_cast<int>(i);
    }
    slot.group = whole_world ? world_->group(device_type_) : world_->new_group(slot.ranks, slot.name, device_type_);
  }
  return slot.group;
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
    TESSERA_CHECK(dims.size() < 2 || dims[dims.size() - 2] < dims.back(), ErrorKind::kShape,
                  "[mesh.slice] {}: found dims {}, wanted them in the order of the mesh, each once. Reorder them.",
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

MeshPtr init_device_mesh(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names) {
  TESSERA_CHECK(device_type == "cpu" || device_type == "cuda", ErrorKind::kShape,
                "[mesh.init] device type: found '{}', wanted 'cpu' or 'cuda' without an index. Each rank uses the "
                "device of its local rank.", device_type);
  TESSERA_CHECK(!shape.empty(), ErrorKind::kShape, "[mesh.init] shape: found no dims, wanted at least one.");
  TESSERA_CHECK(dim_names.empty() || dim_names.size() == shape.size(), ErrorKind::kShape,
                "[mesh.init] dim names: found {} names for {} dims. Give one name for each dim.", dim_names.size(),
                shape.size());
  for (size_t i = 0; i < dim_names.size(); ++i) {
    TESSERA_CHECK(std::count(dim_names.begin(), dim_names.end(), dim_names[i]) == 1, ErrorKind::kShape,
                  "[mesh.init] dim names: found '{}' more than once, wanted unique names.", dim_names[i]);
  }
  int64_t count = 1;
  for (const int64_t extent : shape) {
    TESSERA_CHECK(extent > 0, ErrorKind::kShape, "[mesh.init] shape: found {}, wanted positive sizes.", extent);
    TESSERA_CHECK(count <= world->size() / extent, ErrorKind::kShape,
                  "[mesh.init] shape {}: wants more ranks than the world's {}. Start more ranks or shrink the mesh.",
                  fmt::join(shape, "x"), world->size());
    count *= extent;
  }
  const auto type = device_type == "cpu" ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
  return DeviceMeshBuilder::root(world, type, shape, dim_names, count);
}

}  // namespace tessera
