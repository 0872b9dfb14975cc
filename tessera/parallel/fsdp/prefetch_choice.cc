#include "tessera/parallel/fsdp/prefetch_choice.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera {
namespace {

// One line: rank, wish, whether there are cores.
std::string line_of(const PrefetchVote& vote) {
  const char* wish = !vote.wish ? "default" : *vote.wish ? "on" : "off";
  return fmt::format("{} {} {}\n", vote.rank, wish, vote.core_for_each ? 1 : 0);
}

PrefetchVote vote_of(const std::string& line) {
  std::istringstream words(line);
  PrefetchVote vote;
  std::string wish;
  words >> vote.rank >> wish >> vote.core_for_each;
  if (wish != "default") vote.wish = wish == "on";
  return vote;
}

}  // namespace

bool prefetch_of(const std::vector<PrefetchVote>& votes) {
  const auto word = [](const PrefetchVote& vote) { return !vote.wish ? "not called" : *vote.wish ? "on" : "off"; };
  for (const auto& vote : votes) {
    TESSERA_CHECK(vote.wish == votes[0].wish, ErrorKind::kShape,
                  "[fsdp.forward] set_prefetch: {} on rank {}, {} on rank {}. Prefetch changes the order of "
                  "collectives: call it alike on all ranks.",
                  word(votes[0]), votes[0].rank, word(vote), vote.rank);
  }
  return votes.at(0).wish.value_or(
      std::ranges::all_of(votes, [](const PrefetchVote& vote) { return vote.core_for_each; }));
}

bool agree_on_prefetch(const comm::World& world, const std::vector<MeshPtr>& meshes, std::optional<bool> wish) {
  const bool on_device = std::ranges::any_of(meshes, [](const MeshPtr& mesh) { return !mesh->device().is_cpu(); });
  const bool core_for_each = on_device || world.info().hosts.least_cores_per_rank >= 1;
  std::set<std::string> lines = {line_of({.rank = world.rank(), .wish = wish, .core_for_each = core_for_each})};
  for (const auto& mesh : meshes) {
    for (int64_t dim = mesh->ndim(); dim-- > 0;) {
      if (mesh->size(dim) == 1) continue;
      for (const auto& theirs : comm::all_gather_bytes(*mesh->group(dim), fmt::format("{}", fmt::join(lines, "")))) {
        std::istringstream text(theirs);
        for (std::string line; std::getline(text, line);) lines.insert(line + "\n");
      }
    }
  }
  std::vector<PrefetchVote> votes;
  for (const auto& line : lines) votes.push_back(vote_of(line));
  std::ranges::sort(votes, [](const auto& a, const auto& b) { return a.rank < b.rank; });
  return prefetch_of(votes);
}

}  // namespace tessera
