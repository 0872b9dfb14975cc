// Whether the ranks of a sharded model gather ahead. Prefetch changes the order of collectives, so all ranks must give
// the same answer, whatever each of them sees of its own host.
//
//   const bool prefetch = agree_on_prefetch(*world, {mesh}, std::nullopt);
//
// Thread-safe; without state.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/rendezvous/world.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::parallel {

// What a rank says about itself.
struct RankPlace {
  int rank = 0;
  std::string host;
  int ranks_on_host = 1;     // those of the world
  std::vector<int> cores;    // that it may run on
  std::optional<bool> wish;  // set_prefetch; none: the default
};

// The default: on where every host has a core for each of its ranks. Ranks that are bound to cores of their own count
// those together; ranks that may all run on the same cores share them with all ranks of their host.
bool has_core_for_each(const std::vector<RankPlace>& ranks);

// set_prefetch where it was called, else the default. COLLECTIVE over each of `meshes`, in their order. Error kShape on
// all ranks when wishes differ.
bool agree_on_prefetch(const comm::World& world, const std::vector<MeshPtr>& meshes, std::optional<bool> wish);

}  // namespace tessera::parallel
