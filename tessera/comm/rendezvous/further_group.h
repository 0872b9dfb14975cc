// Another group of ranks that have one already, for collectives that are not to wait for those of the first.
//
//   auto reductions = further_group(gathers, gathers->name() + "_reductions");
//
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/group/group.h"

namespace tessera::comm {

// Made by the world that made `group`, for the same devices; `group` itself where that world is gone, or was none.
// COLLECTIVE over the group.
std::shared_ptr<Group> further_group(const std::shared_ptr<Group>& group, const std::string& name);

}  // namespace tessera::comm
