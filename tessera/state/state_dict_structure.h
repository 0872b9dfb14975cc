// Nested state dicts as flat ones, and comparing them. No communication.
//
//   FlatStateDict flat = flatten_state_dict(state);        // {"state.0.exp_avg": ..., "param_groups.0.lr": ...}
//   StateDict again = unflatten_state_dict(flat);          // equal to `state`
//
// Values are shared, not copied.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/state/state_value.h"

namespace tessera {

// One step from a container to what it holds.
struct PathStep {
  enum class Into { kDict, kList, kTuple };
  Into into = Into::kDict;
  StateKey key;  // a key of the dict, or a position
  bool operator==(const PathStep&) const = default;
};
using StatePath = std::vector<PathStep>;

struct FlatStateDict {
  StateDict values;                                    // in the order of the nested one
  std::unordered_map<std::string, StatePath> mapping;  // where each value was
};

// Every dict, list and tuple is taken apart; keys are the steps of the path joined by dots. Empty ones stay values, so
// that unflatten gives back what was there (PyTorch's loses them, and makes text of numbers among keys). Error kShape
// when two paths give one key: "duplicated flatten key a.b".
FlatStateDict flatten_state_dict(const StateDict& state_dict);
// Paths of the mapping that have no value are left out. Errors kShape: a key without a path, paths that contradict one
// another (a dict at one place for one key, a list for another).
StateDict unflatten_state_dict(const FlatStateDict& flat);

// Whether `test` holds for a leaf, which is any value but a dict, list or tuple. Leaves are tested in order, up to the
// first for which it holds.
bool any_leaf(const StateValue& value, const std::function<bool(const StateValue& leaf)>& test);

// The same tree with what `change` makes of each leaf. The path of a leaf is its keys and positions joined by dots,
// below `path`.
using LeafChange = std::function<StateValue(const StateValue& leaf, const std::string& path)>;
StateValue map_leaves(const StateValue& value, const LeafChange& change, const std::string& path = "");

// Calls `visit` with every tensor, in order; those of sharded tensors not.
void visit_tensors(const StateValue& value, const std::function<void(const at::Tensor&)>& visit);

// Whether both have the same structure, and tensors of the same dtype and size (DTensors: and parts of the same size).
// Other values may differ.
bool check_state_dict_similarity(const StateDict& a, const StateDict& b);

// Whether both are equal in structure and values. Tensors: of one dtype, shape, layout and value on this rank; ints and
// floats of one value are equal, as in Python.
bool same_values(const StateValue& a, const StateValue& b);

}  // namespace tessera
