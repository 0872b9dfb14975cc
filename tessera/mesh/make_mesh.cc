// Creates meshes from a world, from groups and from other meshes.
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/backends/device_backends.h"
#include "tessera/mesh/mesh_builder.h"

namespace tessera {

namespace {

c10::DeviceType checked_type(const std::string& device_type) {
  TESSERA_CHECK(
      device_type.find(':') == std::string::npos, ErrorKind::kShape,
      "[mesh.init] Device type with index is not supported but got {}. Each rank uses the device of its local rank.",
      device_type);
  const auto type = comm::parse_device_type(device_type);
  TESSERA_CHECK(type.has_value(), ErrorKind::kShape,
                "[mesh.init] device type: found '{}', wanted {}. Load the library of an accelerator first: it "
                "registers the device name with libtorch.",
                device_type, comm::device_type_names());
  return *type;
}

// Checks shape and names. Returns the number of ranks in the shape, which must not exceed `world_size`.
int64_t checked_shape(const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names,
                      int64_t world_size) {
  TESSERA_CHECK(!shape.empty(), ErrorKind::kShape, "[mesh.init] shape: found no dims, wanted at least one.");
  TESSERA_CHECK(dim_names.empty() || dim_names.size() == shape.size(), ErrorKind::kShape,
                "[mesh.init] mesh_shape and mesh_dim_names should have same length! Found {} names for {} dims.",
                dim_names.size(), shape.size());
  for (const auto& name : dim_names) {
    TESSERA_CHECK(std::ranges::count(dim_names, name) == 1, ErrorKind::kShape,
                  "[mesh.init] Each mesh_dim_name must be unique. Found '{}' more than once in {}.", name,
                  quoted_names(dim_names));
  }
  int64_t count = 1;
  for (const int64_t extent : shape) {
    TESSERA_CHECK(extent > 0, ErrorKind::kShape, "[mesh.init] shape: found {}, wanted positive sizes.", extent);
    TESSERA_CHECK(
        count <= world_size / extent, ErrorKind::kShape,
        "[mesh.init] Mesh should not be bigger than default world size {}, but found shape {}. Start more ranks or "
        "shrink the mesh.",
        world_size, fmt::join(shape, "x"));
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
  auto mesh = DeviceMeshBuilder::make_root(world, type, shape, dim_names, std::move(ranks));
  DeviceMeshBuilder::split_groups(*mesh);
  return mesh;
}

MeshPtr make_device_mesh(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<int>& ranks, const std::vector<int64_t>& shape,
                         const std::vector<std::string>& dim_names) {
  const auto type = checked_type(device_type);
  const int64_t count = checked_shape(shape, dim_names, world->size());
  TESSERA_CHECK(count == static_cast<int64_t>(ranks.size()), ErrorKind::kShape,
                "[mesh.init] ranks: found {} of them for shape {}, wanted {}, one for each element of the mesh.",
                ranks.size(), fmt::join(shape, "x"), count);
  std::vector<bool> seen(world->size(), false);
  for (const int rank : ranks) {
    TESSERA_CHECK(rank >= 0 && rank < world->size(), ErrorKind::kShape,
                  "[mesh.init] ranks: found {}, wanted ranks of the world, 0..{}.", rank, world->size() - 1);
    TESSERA_CHECK(!seen[rank], ErrorKind::kShape, "[mesh.init] ranks: found {} more than once, wanted each rank once.",
                  rank);
    seen[rank] = true;
  }
  return DeviceMeshBuilder::make_root(world, type, shape, dim_names, ranks);
}

// make_device_mesh() makes the mesh. Then set_group() stores the given process group of each dim, so that the mesh
// creates no group for the dim later. set_group() raises an error if the group of a dim does not consist of the ranks
// that differ from this rank only in their coordinate on that dim.
MeshPtr mesh_from_groups(const std::shared_ptr<comm::World>& world, const std::string& device_type,
                         const std::vector<std::shared_ptr<comm::Group>>& groups, const std::vector<int>& ranks,
                         const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names) {
  TESSERA_CHECK(
      !groups.empty() && std::ranges::none_of(groups, [](const auto& g) { return g == nullptr; }), ErrorKind::kShape,
      "[mesh.from_groups] groups: found no groups, or a null pointer among them, wanted one group for each mesh dim.");
  TESSERA_CHECK(
      groups.size() == 1 || (!ranks.empty() && shape.size() == groups.size()), ErrorKind::kShape,
      "[mesh.from_groups] found {} groups and a shape of {} dims: Must pass mesh if passing multiple ProcessGroups. "
      "Give ranks and a shape with one dim for each group.",
      groups.size(), shape.size());
  const bool one = groups.size() == 1 && ranks.empty();
  auto mesh = make_device_mesh(world, device_type, one ? groups[0]->ranks() : ranks,
                               one ? std::vector<int64_t>{groups[0]->size()} : shape, dim_names);
  TESSERA_CHECK(mesh->coordinate().has_value(), ErrorKind::kShape,
                "[mesh.from_groups] {}: rank {} is not part of the mesh. Call this on ranks of the mesh only.",
                mesh->to_string(), world->rank());
  for (size_t dim = 0; dim < groups.size(); ++dim) {
    DeviceMeshBuilder::set_group(*mesh, static_cast<int64_t>(dim), groups[dim]);
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
                "init_device_mesh created.",
                first->to_string(), second->to_string());
  return mesh;
}

}  // namespace tessera
