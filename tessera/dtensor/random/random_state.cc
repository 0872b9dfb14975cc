// Keeps the random state of each rank: the seed and the number of random operations that have run.
#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <map>
#include <mutex>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/random/random.h"
#include "tessera/dtensor/random/random_fill.h"

namespace tessera {

namespace {

// manual_seed() sets one state for all meshes of a rank. Without manual_seed() there is a separate state for the rank
// set of each mesh, because the seed was broadcast only among the ranks of the mesh.
struct RankState {
  std::optional<RandomState> seeded;                 // set by manual_seed()
  std::map<std::vector<int>, RandomState> by_ranks;  // used if `seeded` is empty
};

// Returns the state of a rank. The rank is identified by its World, because several ranks may be threads of one
// process. Only the rank itself uses its state; the mutex protects the map of all states. States of destroyed Worlds
// are removed.
std::shared_ptr<RankState> state_of(const std::shared_ptr<comm::World>& world) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<comm::World>, std::shared_ptr<RankState>, std::owner_less<>> all;
  std::lock_guard lock(mutex);
  const auto found = all.find(world);
  if (found != all.end()) return found->second;
  std::erase_if(all, [](const auto& entry) { return entry.first.expired(); });
  return all[world] = std::make_shared<RankState>();
}

uint64_t draw_seed(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

// Returns on all ranks a seed that the mesh's first rank draws from its default generator. COLLECTIVE over the mesh,
// with one broadcast for each mesh dim.
uint64_t broadcast_seed(const DeviceMesh& mesh) {
  std::string bytes(sizeof(uint64_t), '\0');
  const uint64_t own = draw_seed(at::detail::getDefaultCPUGenerator());
  std::memcpy(bytes.data(), &own, sizeof own);
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    if (mesh.shape()[dim] > 1) bytes = comm::broadcast_bytes(*mesh.group(dim), bytes, 0);
  }
  uint64_t seed = 0;
  std::memcpy(&seed, bytes.data(), sizeof seed);
  return seed;
}

RandomState& state_of_mesh(const DeviceMesh& mesh, RankState& rank) {
  if (rank.seeded) return *rank.seeded;
  const auto known = rank.by_ranks.find(mesh.ranks());
  if (known != rank.by_ranks.end()) return known->second;
  TESSERA_CHECK(mesh.coordinate().has_value(), ErrorKind::kShape,
                "[dtensor.random_state] {}: rank {} is not part of the mesh. Call manual_seed.", mesh.to_string(),
                mesh.rank());
  return rank.by_ranks[mesh.ranks()] = RandomState{broadcast_seed(mesh), 0};
}

}  // namespace

// RandomState::offset counts the random operations of this rank. It is incremented before the operation uses it, so the
// first operation has number 1. With a `generator` argument the generator's state is advanced instead, and the rank's
// RandomState stays as it is.
RandomStreamKey next_random_key(const DeviceMesh& mesh, const std::optional<at::Generator>& generator) {
  if (generator && generator->defined()) {
    at::Generator own = *generator;
    if (own.device().is_cpu()) return {draw_seed(own), 0};
    std::lock_guard lock(own.mutex());
    const uint64_t offset = own.get_offset();  // generators require a multiple of 4
    own.set_offset(offset + 4);
    return {own.current_seed(), offset};
  }
  const auto rank = state_of(mesh.world());
  RandomState& state = state_of_mesh(mesh, *rank);
  return {state.seed, ++state.offset};
}

void skip_random_operation(const DeviceMesh& mesh) {
  const auto rank = state_of(mesh.world());
  if (rank->seeded) ++rank->seeded->offset;
}

void manual_seed(uint64_t seed, const MeshPtr& mesh) { set_random_state({seed, 0}, mesh); }

RandomState random_state(const MeshPtr& mesh) { return state_of_mesh(*mesh, *state_of(mesh->world())); }

void set_random_state(const RandomState& state, const MeshPtr& mesh) { state_of(mesh->world())->seeded = state; }

}  // namespace tessera
