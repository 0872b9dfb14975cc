// Flattens nested state dicts and compares state dicts. No communication.
//
//   FlatStateDict flat = flatten_state_dict(state);        // {"state.0.exp_avg": ..., "param_groups.0.lr": ...}
//   StateDict again = unflatten_state_dict(flat);          // equal to `state`
//
// Tensors are shared, not copied.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/state/state_value.h"

namespace tessera {

// One step of a path: from a container to one of its values.
struct PathStep {
  enum class Into { kDict, kList, kTuple };
  Into into = Into::kDict;
  StateKey key;  // a key of the dict, or a position
  bool operator==(const PathStep&) const = default;
};
using StatePath = std::vector<PathStep>;

struct FlatStateDict {
  StateDict values;                                    // in the order of the nested dict
  std::unordered_map<std::string, StatePath> mapping;  // path of each value in the nested dict
};

// Flattens every dict, list and tuple. The key of a value is its path, joined by dots. Empty containers are kept as
// values, so that unflatten_state_dict restores the same dict (PyTorch loses empty containers and turns number keys
// into text). Error kShape when two paths give one key: "duplicated flatten key a.b".
FlatStateDict flatten_state_dict(const StateDict& state_dict);
// Restores the nested dict. Paths of the mapping without a value are ignored. Errors kShape: a key without a path, and
// paths that contradict each other (one path needs a dict where another path needs a list).
StateDict unflatten_state_dict(const FlatStateDict& flat);

// Returns whether `test` is true for a leaf. A leaf is any value except a dict, list or tuple. Leaves are tested in
// order, up to the first true result.
bool any_leaf(const StateValue& value, const std::function<bool(const StateValue& leaf)>& test);

// Returns a copy of `value` in which each leaf (any value except a dict, list or tuple) is replaced by the result of
// `change`. The path of a leaf is `path`, then its keys and positions, joined by dots.
using LeafChange = std::function<StateValue(const StateValue& leaf, const std::string& path)>;
StateValue map_leaves(const StateValue& value, const LeafChange& change, const std::string& path = "");

// Calls `visit` with every tensor, in order. The shards of ShardedTensors are not visited.
void visit_tensors(const StateValue& value, const std::function<void(const at::Tensor&)>& visit);

// Returns whether both dicts have the same structure, and tensors of the same dtype and size (DTensors also with local
// tensors of the same size). Values of other types may differ.
bool check_state_dict_similarity(const StateDict& a, const StateDict& b);

// Returns whether both values are equal in structure and content. Tensors are equal when dtype, shape, layout and this
// rank's elements are equal. An int equals a float of the same value, as in Python.
bool same_values(const StateValue& a, const StateValue& b);

}  // namespace tessera
