// Whether the ranks of a sharded model gather ahead. Prefetch changes the order of collectives, so all ranks must give
// the same answer.
//
//   const bool prefetch = agree_on_prefetch(*world, {mesh}, std::nullopt);
//
// Thread-safe; without state.
#pragma once

#include <compare>
#include <optional>
#include <vector>

#include "tessera/comm/rendezvous/world.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

// What a rank has to say.
struct PrefetchVote {
  int rank = 0;
  std::optional<bool> wish;  // set_prefetch; none: the default
  // Every host of the world has a core for each of its ranks (Hosts), as this rank knows; or an accelerator computes.
  bool core_for_each = false;
  auto operator<=>(const PrefetchVote&) const = default;
};

// The wish of all, else the default: on where every rank knows of a core for each rank. Error kShape names two ranks
// with unlike wishes.
bool prefetch_of(const std::vector<PrefetchVote>& votes);

// The same of all ranks of `meshes`. COLLECTIVE over each of them, in their order; the Error is that of all ranks.
bool agree_on_prefetch(const comm::World& world, const std::vector<MeshPtr>& meshes, std::optional<bool> wish);

}  // namespace tessera
