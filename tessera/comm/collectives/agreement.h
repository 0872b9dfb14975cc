// Agreement between the ranks of a group: an error or a differing value of one rank becomes an error on every rank,
// before any rank waits for the others.
//
//   comm::attempt_together(group, [&] { model = read(path); });        // throws on all ranks when it throws on one
//   comm::check_same(group, {{"train.seed", "42"}, {"data", hash}});   // throws on all ranks when a value differs
//
// Both functions are COLLECTIVE over the group.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/comm/group/group.h"

namespace tessera::comm {

// Runs `action` on each rank. When `action` throws on some rank, every rank throws an Error with the kind and the
// message of the first failing rank, after the prefix "rank N: " (N: global rank).
void attempt_together(Group& group, const std::function<void()>& action);

// Pairs of name and value. All ranks must pass equal values, with the same names in the same order.
using NamedValues = std::vector<std::pair<std::string, std::string>>;

// Throws Error kConfig on every rank when a fact differs. The message names the first three facts that differ, the
// values of two ranks, and `remedy`.
void check_same(Group& group, const NamedValues& facts, std::string_view remedy);

}  // namespace tessera::comm
