#include "tessera/parallel/fsdp/prefetch_choice.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera {

bool prefetch_of(const std::vector<PrefetchVote>& votes) {
  const auto word = [](const PrefetchVote& vote) { return !vote.wish ? "not called" : *vote.wish ? "on" : "off"; };
  for (const auto& vote : votes) {
    TESSERA_CHECK(
        vote.wish == votes[0].wish, ErrorKind::kShape,
        "[fsdp.forward] set_prefetch differs between ranks: {} on rank {}, {} on rank {}. Prefetch changes the "
        "order of collectives: pass the same value on all ranks.",
        word(votes[0]), votes[0].rank, word(vote), vote.rank);
  }
  return votes.at(0).wish.value_or(
      std::ranges::all_of(votes, [](const PrefetchVote& vote) { return vote.core_for_each; }));
}

bool agree_on_prefetch(const comm::World& world, const std::vector<MeshPtr>& meshes, std::optional<bool> wish) {
  const bool on_device = std::ranges::any_of(meshes, [](const MeshPtr& mesh) { return !mesh->device().is_cpu(); });
  const bool core_for_each = on_device || world.info().hosts.least_cores_per_rank >= 1;
  // Each dim of each mesh exchanges the votes known so far, last dim first. After the last exchange every rank knows
  // the votes of all ranks that are connected through the meshes. A set keeps each rank's vote once, ordered by rank.
  std::set<PrefetchVote> votes = {{.rank = world.rank(), .wish = wish, .core_for_each = core_for_each}};
  for (const auto& mesh : meshes) {
    for (int64_t dim = mesh->ndim(); dim-- > 0;) {
      if (mesh->size(dim) == 1) continue;
      const std::vector<PrefetchVote> known(votes.begin(), votes.end());
      const std::string_view bytes(reinterpret_cast<const char*>(known.data()), known.size() * sizeof(PrefetchVote));
      for (const auto& theirs : comm::all_gather_bytes(*mesh->group(dim), bytes)) {
        std::vector<PrefetchVote> told(theirs.size() / sizeof(PrefetchVote));
        std::memcpy(told.data(), theirs.data(), theirs.size());
        votes.insert(told.begin(), told.end());
      }
    }
  }
  return prefetch_of({votes.begin(), votes.end()});  // ordered by rank
}

}  // namespace tessera
