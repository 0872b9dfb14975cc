// Decides whether the ranks of a sharded model prefetch. Prefetch changes the order of collectives, so all ranks must
// use the same setting.
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

// The input of one rank to decide_prefetch().
struct PrefetchVote {
  int rank = 0;
  std::optional<bool> requested;  // the value of set_prefetch; none: not called
  // Whether a mesh of this rank has accelerators, or every host has at least one CPU core for each of its ranks
  // (HostSummary::least_cores_per_rank).
  bool core_for_each = false;
  auto operator<=>(const PrefetchVote&) const = default;
};

// Returns the value that all ranks have passed to set_prefetch(). If no rank has called set_prefetch(), returns the
// default: true if every rank has accelerators or enough CPU cores (PrefetchVote::core_for_each). Error kShape, which
// names two ranks, when the ranks have passed different values or only some of them have called set_prefetch().
bool decide_prefetch(const std::vector<PrefetchVote>& votes);

// Exchanges the PrefetchVotes of all ranks of `meshes` and returns what decide_prefetch() returns for these votes.
// `requested` is PrefetchVote::requested of this rank. COLLECTIVE over each mesh, in order. Every rank gets the same
// result or the same Error.
bool agree_on_prefetch(const comm::World& world, const std::vector<MeshPtr>& meshes, std::optional<bool> requested);

}  // namespace tessera
