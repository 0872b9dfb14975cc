// A second group over the ranks of an existing group. Collectives of the two groups do not wait for one another.
//
//   auto reductions = new_group_like(gathers, gathers->name() + "_reductions");
//
#pragma once

#include <memory>
#include <string>

#include "tessera/comm/group/group.h"

namespace tessera::comm {

// Makes a group of the same ranks and devices in the world that made `group`. Returns `group` itself when that world
// has been destroyed, or when no world made the group. COLLECTIVE over the group.
std::shared_ptr<Group> new_group_like(const std::shared_ptr<Group>& group, const std::string& name);

}  // namespace tessera::comm
