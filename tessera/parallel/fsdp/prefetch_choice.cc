#include "tessera/parallel/fsdp/prefetch_choice.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera {

bool decide_prefetch(const std::vector<PrefetchVote>& votes) {
  const auto describe = [](const PrefetchVote& vote) {
    return !vote.requested ? "not called" : *vote.requested ? "on" : "off";
  };
  for (const auto& vote : votes) {
    TESSERA_CHECK(
        vote.requested == votes[0].requested, ErrorKind::kShape,
        "[fsdp.forward] set_prefetch differs between ranks: {} on rank {}, {} on rank {}. Prefetch changes the "
        "order of collectives: pass the same value on all ranks.",
        describe(votes[0]), votes[0].rank, describe(vote), vote.rank);
  }
  return votes.at(0).requested.value_or(
      std::ranges::all_of(votes, [](const PrefetchVote& vote) { return vote.core_for_each; }));
}

bool agree_on_prefetch(const comm::World& world, const std::vector<MeshPtr>& meshes, std::optional<bool> requested) {
  const bool on_device = std::ranges::any_of(meshes, [](const MeshPtr& mesh) { return !mesh->device().is_cpu(); });
  const bool core_for_each = on_device || world.info().hosts.least_cores_per_rank >= 1;
  // For each dim of each mesh, last dim first, the ranks along this dim exchange all PrefetchVotes that they know so
  // far. After the last exchange every rank knows the votes of all ranks that the meshes connect. `votes` holds one
  // vote per rank, ordered by rank.
  std::set<PrefetchVote> votes = {{.rank = world.rank(), .requested = requested, .core_for_each = core_for_each}};
  for (const auto& mesh : meshes) {
    for (int64_t dim = mesh->ndim(); dim-- > 0;) {
      if (mesh->size(dim) == 1) continue;
      const std::vector<PrefetchVote> known(votes.begin(), votes.end());
      const std::string_view bytes(reinterpret_cast<const char*>(known.data()), known.size() * sizeof(PrefetchVote));
      for (const auto& theirs : comm::all_gather_bytes(*mesh->group(dim), bytes)) {
        std::vector<PrefetchVote> received(theirs.size() / sizeof(PrefetchVote));
        std::memcpy(received.data(), theirs.data(), theirs.size());
        votes.insert(received.begin(), received.end());
      }
    }
  }
  return decide_prefetch({votes.begin(), votes.end()});  // ordered by rank
}

}  // namespace tessera
