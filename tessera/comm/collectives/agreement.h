// Ranks that differ are told so, all of them, before they wait for one another.
//
//   comm::attempt_together(group, [&] { model = read(path); });        // throws on all ranks when it throws on one
//   comm::check_same(group, {{"train.seed", "42"}, {"data", hash}});   // throws on all ranks when a value differs
//
// Each is COLLECTIVE over the group.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera::comm {

// Runs `action` on each rank. When it threw on any, every rank throws an Error of the kind that the first of them
// threw, with its message and "rank N" in front.
void attempt_together(Group& group, const std::function<void()>& action);

// Names and values that must be equal on all ranks, the same names in the same order.
using Facts = std::vector<std::pair<std::string, std::string>>;

// Error kConfig on every rank names the facts that differ, what two ranks have, and `remedy`.
void check_same(Group& group, const Facts& facts, std::string_view remedy);

}  // namespace tessera::comm
