// All-gather of lists of names, for example parameter FQNs.
//
//   const auto of_ranks = comm::gather_names(group, {"model.norm.weight", ...});     // COLLECTIVE over the group
//   of_ranks[1];                                                                     // names passed by rank 1
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera::comm {

// Returns the lists of all ranks, in rank order; each list keeps its order. The lists may differ in length. Error
// kInternal for a name with a line break. COLLECTIVE over the group.
std::vector<std::vector<std::string>> gather_names(Group& group, const std::vector<std::string>& names);

}  // namespace tessera::comm
