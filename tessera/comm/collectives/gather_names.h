// Names from each rank to all.
//
//   const auto of_ranks = comm::gather_names(group, {"model.norm.weight", ...});     // COLLECTIVE over the group
//   of_ranks[1];                                                                     // those that its rank 1 passed
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera::comm {

// In rank order, as each rank passed them. Error kInternal for a name with a line break. COLLECTIVE over the group.
std::vector<std::vector<std::string>> gather_names(Group& group, const std::vector<std::string>& names);

}  // namespace tessera::comm
