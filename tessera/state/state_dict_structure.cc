#include "tessera/state/state_dict_structure.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/state/sharded_tensor.h"

namespace tessera {
namespace {

using Into = PathStep::Into;

// Walks a dict depth first. `key` and `path` describe the present position. They are extended for a child and restored
// after it.
struct Flattener {
  FlatStateDict out;
  StatePath path;
  std::string key;

  void flatten_child(Into into, const StateKey& step, const StateValue& value) {
    const size_t length = key.size();
    if (!path.empty()) key += '.';
    key += to_string(step);
    path.push_back({into, step});
    visit(value);
    path.pop_back();
    key.resize(length);
  }

  void visit(const StateValue& value) {
    if (value.is_dict() && !value.dict().empty()) {
      for (const auto& [step, child] : value.dict()) flatten_child(Into::kDict, step, child);
      return;
    }
    if (const auto* items = items_of(value); items && !items->empty()) {
      const auto into = value.is_list() ? Into::kList : Into::kTuple;
      for (size_t i = 0; i < items->size(); ++i) flatten_child(into, static_cast<int64_t>(i), (*items)[i]);
      return;
    }
    TESSERA_CHECK(out.mapping.emplace(key, path).second, ErrorKind::kShape,
                  "[state.flatten] duplicated flatten key {}: two values would have it. Rename one.", quote(key));
    out.values.set(key, value);
  }
};

// Returns the child at `step` of the container `value`. A `value` of None becomes an empty dict, list or tuple, as the
// step needs; any other `value` must be of that type.
StateValue& child_at(StateValue& value, const PathStep& step, const std::string& key) {
  if (value.is_none()) {
    if (step.into == Into::kDict) value = StateDict();
    if (step.into == Into::kList) value = StateList();
    if (step.into == Into::kTuple) value = StateTuple();
  }
  const bool fits = step.into == Into::kDict   ? value.is_dict()
                    : step.into == Into::kList ? value.is_list()
                                               : value.is_tuple();
  TESSERA_CHECK(fits, ErrorKind::kShape,
                "[state.unflatten] {}: its path contradicts an earlier one, which has a {} there", quote(key),
                type_name(value));
  if (step.into == Into::kDict) {
    auto* found = value.dict().find(step.key);
    return found ? *found : value.dict().set(step.key, {});
  }
  const auto position = std::get<int64_t>(step.key);
  auto& items = value.is_list() ? value.list() : std::get<StateTuple>(value.variant()).items;
  // A list that is rebuilt from parts (a shard of a checkpoint) has None where values are missing. kLongest limits the
  // memory that a position from a hostile file can allocate.
  constexpr int64_t kLongest = int64_t{1} << 24;
  TESSERA_CHECK(position >= 0 && position < kLongest, ErrorKind::kShape,
                "[state.unflatten] {}: found position {} of a list, wanted 0..{}", quote(key), position, kLongest - 1);
  if (items.size() <= static_cast<size_t>(position)) items.resize(static_cast<size_t>(position) + 1);
  return items[static_cast<size_t>(position)];
}

// Whether both tensors have equal dtype and size, and, for DTensors, local tensors of equal size. Values are not read.
bool similar_tensors(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && is_dtensor(a) == is_dtensor(b) &&
         (!is_dtensor(a) || to_local(a).sizes() == to_local(b).sizes());
}

// Whether `a` and `b` are both null, or both have equal size and dtype, and on this rank the same number of shards,
// which in order have equal offsets and are similar_tensors(). The shards of other ranks are not compared.
bool similar_sharded(const ShardedTensor* a, const ShardedTensor* b) {
  if (!a || !b) return a == b;
  if (a->size != b->size || a->dtype != b->dtype || a->local_shards.size() != b->local_shards.size()) return false;
  for (size_t i = 0; i < a->local_shards.size(); ++i) {
    if (a->local_shards[i].metadata.shard_offsets != b->local_shards[i].metadata.shard_offsets) return false;
    if (!similar_tensors(a->local_shards[i].tensor, b->local_shards[i].tensor)) return false;
  }
  return true;
}

// Compares this rank's elements only, so no communication is needed. Two meta tensors are equal if dtype, size, mesh
// and placements are equal.
bool equal_tensors(const at::Tensor& a, const at::Tensor& b) {
  if (!similar_tensors(a, b)) return false;
  if (!a.defined() || a.is_same(b)) return true;
  if (is_dtensor(a) && (placements(a) != placements(b) || !(*device_mesh(a) == *device_mesh(b)))) return false;
  const at::Tensor left = local_tensor_of(a.detach()), right = local_tensor_of(b.detach());
  if (left.is_meta() || right.is_meta()) return left.is_meta() && right.is_meta();
  return at::equal(left, right.to(left.device()));
}

bool equal_sharded(const ShardedTensor* a, const ShardedTensor* b) {
  if (!similar_sharded(a, b)) return false;
  for (size_t i = 0; a && i < a->local_shards.size(); ++i) {
    if (!equal_tensors(a->local_shards[i].tensor, b->local_shards[i].tensor)) return false;
  }
  return true;
}

// Returns whether two trees have the same structure and leaves(a, b) is true for each leaf a of the first tree and the
// leaf b at its place in the second tree.
template <class Leaves>
bool same_structure(const StateValue& a, const StateValue& b, const Leaves& leaves) {
  if (a.is_dict() && b.is_dict()) {
    if (a.dict().size() != b.dict().size()) return false;
    for (const auto& [key, value] : a.dict()) {
      const auto* other = b.dict().find(key);
      if (other == nullptr || !same_structure(value, *other, leaves)) return false;
    }
    return true;
  }
  const auto *left = items_of(a), *right = items_of(b);
  if (left && right) {
    if (a.is_list() != b.is_list() || left->size() != right->size()) return false;
    for (size_t i = 0; i < left->size(); ++i) {
      if (!same_structure((*left)[i], (*right)[i], leaves)) return false;
    }
    return true;
  }
  return leaves(a, b);
}

bool is_number(const StateValue& value) { return value.is_int() || value.is_double(); }

}  // namespace

FlatStateDict flatten_state_dict(const StateDict& state_dict) {
  Flattener flattener;
  for (const auto& [key, value] : state_dict) flattener.flatten_child(Into::kDict, key, value);
  return std::move(flattener.out);
}

StateDict unflatten_state_dict(const FlatStateDict& flat) {
  StateValue root = StateDict();
  for (const auto& [key, value] : flat.values) {
    // child_at() makes the containers along each path. The path must end where no value is stored yet.
    const auto found = flat.mapping.find(to_string(key));
    TESSERA_CHECK(found != flat.mapping.end() && !found->second.empty(), ErrorKind::kShape,
                  "[state.unflatten] {}: the mapping has no path for it", quote(to_string(key)));
    StateValue* place = &root;
    for (const auto& step : found->second) place = &child_at(*place, step, found->first);
    TESSERA_CHECK(place->is_none(), ErrorKind::kShape,
                  "[state.unflatten] {}: another value is stored at its path, or below it", quote(found->first));
    *place = value;
  }
  return std::move(root.dict());
}

bool any_leaf(const StateValue& value, const std::function<bool(const StateValue&)>& test) {
  if (value.is_dict()) {
    return std::ranges::any_of(value.dict(), [&](const auto& item) { return any_leaf(item.second, test); });
  }
  if (const auto* items = items_of(value)) {
    return std::ranges::any_of(*items, [&](const auto& item) { return any_leaf(item, test); });
  }
  return test(value);
}

StateValue map_leaves(const StateValue& value, const LeafChange& change, const std::string& path) {
  const auto below = [&](const StateKey& step, const StateValue& child) {
    return map_leaves(child, change, path.empty() ? to_string(step) : path + "." + to_string(step));
  };
  if (value.is_dict()) {
    StateDict changed;
    for (const auto& [key, child] : value.dict()) changed.set(key, below(key, child));
    return changed;
  }
  if (const auto* items = items_of(value)) {
    StateList changed;
    for (const auto& item : *items) changed.push_back(below(static_cast<int64_t>(changed.size()), item));
    if (value.is_list()) return changed;
    return StateTuple{std::move(changed)};
  }
  return change(value, path);
}

void visit_tensors(const StateValue& value, const std::function<void(const at::Tensor&)>& visit) {
  any_leaf(value, [&](const StateValue& leaf) {
    if (leaf.is_tensor()) visit(leaf.tensor());
    return false;
  });
}

bool check_state_dict_similarity(const StateDict& a, const StateDict& b) {
  return same_structure(a, b, [](const StateValue& left, const StateValue& right) {
    if (left.is_tensor() || right.is_tensor()) {
      return left.is_tensor() && right.is_tensor() && similar_tensors(left.tensor(), right.tensor());
    }
    if (left.is_sharded() || right.is_sharded()) {
      return left.is_sharded() && right.is_sharded() && similar_sharded(left.sharded().get(), right.sharded().get());
    }
    return !left.is_dict() && !right.is_dict() && !items_of(left) && !items_of(right);
  });
}

bool same_values(const StateValue& a, const StateValue& b) {
  return same_structure(a, b, [](const StateValue& left, const StateValue& right) {
    if (is_number(left) && is_number(right)) return left.number() == right.number();
    if (left.variant().index() != right.variant().index()) return false;
    if (left.is_tensor()) return equal_tensors(left.tensor(), right.tensor());
    if (left.is_sharded()) return equal_sharded(left.sharded().get(), right.sharded().get());
    if (left.is_bytes()) {
      return std::get<StateBytes>(left.variant()).bytes == std::get<StateBytes>(right.variant()).bytes;
    }
    if (left.is_string()) return left.string() == right.string();
    if (left.is_bool()) return std::get<bool>(left.variant()) == std::get<bool>(right.variant());
    return left.is_none();
  });
}

}  // namespace tessera
