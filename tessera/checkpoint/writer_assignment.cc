#include "tessera/checkpoint/writer_assignment.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {
namespace {

constexpr int64_t kRecordBytes =
    1024;  // size of a record without its data; counted so that small tensors are spread, too

std::vector<int> sorted(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  return ranks;
}

// Whether the tensor's mesh consists of exactly the holders, the ranks with the same tensor names. `holders` is in
// ascending order.
bool covers_all_holders(const at::TensorBase& tensor, const std::vector<int>& holders) {
  const auto& ranks = device_mesh(tensor)->ranks();
  return ranks.size() == holders.size() &&
         std::ranges::all_of(ranks, [&](int rank) { return std::ranges::binary_search(holders, rank); });
}

int lowest_rank(const DeviceMesh& mesh) { return *std::min_element(mesh.ranks().begin(), mesh.ranks().end()); }

struct MeshClaim {
  uint64_t position;
  int64_t lowest;
};

}  // namespace

std::string partial_mesh_claims(const NamedTensors& tensors, const std::vector<int>& holders) {
  std::vector<MeshClaim> claims;
  const auto all = sorted(holders);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i].second;
    if (!is_dtensor(tensor) || covers_all_holders(tensor, all) || !device_mesh(tensor)->coordinate()) continue;
    claims.push_back({i, lowest_rank(*device_mesh(tensor))});
  }
  return {reinterpret_cast<const char*>(claims.data()), claims.size() * sizeof(MeshClaim)};
}

// All ranks pass the same `claims` (the results of partial_mesh_claims on all ranks), so they choose the same mesh for
// each tensor.
ChosenMeshes choose_meshes(const std::vector<std::string>& claims, const std::vector<int>& holders) {
  ChosenMeshes chosen;
  for (const int holder : holders) {
    const auto& bytes = claims.at(static_cast<size_t>(holder));
    for (size_t at = 0; at + sizeof(MeshClaim) <= bytes.size(); at += sizeof(MeshClaim)) {
      MeshClaim claim{};
      std::memcpy(&claim, bytes.data() + at, sizeof claim);
      const int lowest = static_cast<int>(claim.lowest);
      const auto [known, is_new] = chosen.try_emplace(claim.position, lowest);
      if (!is_new) known->second = std::min(known->second, lowest);
    }
  }
  return chosen;
}

WriterAssignment::WriterAssignment(int rank, const std::vector<int>& holders, ChosenMeshes chosen)
    : rank_(rank), holders_(sorted(holders)), chosen_(std::move(chosen)) {
  for (const int holder : holders) bytes_[holder] = 0;
}

bool WriterAssignment::assign(const at::TensorBase& tensor, size_t position) {
  if (!is_dtensor(tensor)) return assign_replicated(static_cast<int64_t>(tensor.nbytes()) + kRecordBytes);
  return covers_all_holders(tensor, holders_) ? assign_shards(tensor) : is_chosen_replica(tensor, position);
}

// Greedy balance: the holder with the fewest bytes so far (bytes_) writes the tensor; of several, the lowest rank.
// Returns whether that is this rank. All holders call this function for the same tensors in the same order, so bytes_
// stays equal on all of them without communication.
bool WriterAssignment::assign_replicated(int64_t bytes) {
  const auto least = std::ranges::min_element(bytes_, [](const auto& a, const auto& b) { return a.second < b.second; });
  least->second += bytes;
  return least->first == rank_;
}

// Returns whether this rank is in the mesh that choose_meshes() selected and its mesh coordinate is 0 in all replicated
// mesh dims.
bool WriterAssignment::is_chosen_replica(const at::TensorBase& tensor, size_t position) const {
  const auto& mesh = *device_mesh(tensor);
  const auto chosen = chosen_.find(position);
  if (!mesh.coordinate() || chosen == chosen_.end() || lowest_rank(mesh) != chosen->second) return false;
  const auto& tensor_placements = placements(tensor);
  for (size_t dim = 0; dim < tensor_placements.size(); ++dim) {
    if (tensor_placements[dim].is_replicate() && (*mesh.coordinate())[dim] != 0) return false;
  }
  return true;
}

// Selects one writer for each shard of `tensor`: like assign_replicated(), but only among the ranks that hold the
// shard. Returns whether this rank is the writer of the shard that it holds. In the body, `part` is the index of a
// shard: its mesh coordinates in the sharded mesh dims, counted in row-major order.
bool WriterAssignment::assign_shards(const at::TensorBase& tensor) {
  const auto& mesh = *device_mesh(tensor);
  const auto& ranks = mesh.ranks();
  const auto& tensor_placements = placements(tensor);
  const auto is_replica = [&](size_t dim) { return tensor_placements[dim].is_replicate(); };
  // Ranks whose coordinates differ only in replicated dims hold the same shard.
  int64_t parts = 1;
  std::vector<int64_t> stride(tensor_placements.size(), 0);  // of a coordinate in `part`; 0 for replicated dims
  for (size_t dim = tensor_placements.size(); dim-- > 0;) {
    if (is_replica(dim)) continue;
    stride[dim] = parts;
    parts *= mesh.size(static_cast<int64_t>(dim));
  }
  std::vector<std::map<int, int64_t>::value_type*> writer(static_cast<size_t>(parts), nullptr);
  for (size_t at = 0; at < ranks.size(); ++at) {
    int64_t part = 0, remaining_index = static_cast<int64_t>(at);  // ranks() is in row-major order of coordinates
    for (size_t dim = tensor_placements.size(); dim-- > 0;) {
      part += remaining_index % mesh.size(static_cast<int64_t>(dim)) * stride[dim];
      remaining_index /= mesh.size(static_cast<int64_t>(dim));
    }
    auto*& chosen = writer[static_cast<size_t>(part)];
    auto& candidate = *bytes_.find(ranks[at]);
    if (!chosen || candidate.second < chosen->second ||
        (candidate.second == chosen->second && candidate.first < chosen->first)) {
      chosen = &candidate;
    }
  }
  const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size()) / parts + kRecordBytes;
  bool here = false;
  for (auto* chosen : writer) {
    chosen->second += bytes;
    here = here || chosen->first == rank_;
  }
  return here;
}

}  // namespace tessera
