#include "tessera/state/pickled_state.h"

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

struct ToPickle {
  const PickleTensor& tensor;

  PickleValue::Items items(const StateList& values) const {
    PickleValue::Items items;
    for (const auto& value : values) items.push_back(to_pickle(value, tensor));
    return items;
  }
  PickleValue operator()(std::monostate) const { return {}; }
  PickleValue operator()(bool value) const { return value; }
  PickleValue operator()(int64_t value) const { return value; }
  PickleValue operator()(double value) const { return value; }
  PickleValue operator()(const std::string& value) const { return value; }
  PickleValue operator()(const StateBytes& value) const { return PickleValue::bytes(value.bytes); }
  PickleValue operator()(const StateList& value) const { return PickleValue::list(items(value)); }
  PickleValue operator()(const StateTuple& value) const { return PickleValue::tuple(items(value.items)); }
  PickleValue operator()(const StateDict& value) const {
    std::vector<PickleValue::Pair> pairs;
    for (const auto& [key, each] : value) {
      const auto* number = std::get_if<int64_t>(&key);
      pairs.emplace_back(number ? PickleValue(*number) : PickleValue(std::get<std::string>(key)),
                         to_pickle(each, tensor));
    }
    return PickleValue::dict(std::move(pairs));
  }
  PickleValue operator()(const at::Tensor& value) const {
    TESSERA_CHECK(tensor, ErrorKind::kShape,
                  "[state.pickle] found a tensor inside an object. Save each tensor under its own name.");
    return PickleValue::persistent(tensor(value));
  }
  PickleValue operator()(const std::shared_ptr<ShardedTensor>&) const {
    raise(ErrorKind::kShape,
          "[state.pickle] found a ShardedTensor. Gather it first (all_gather_sharded_tensor), or save it under a name "
          "of its own.");
  }
};

struct FromPickle {
  const std::string& name;
  const UnpickleTensor& tensor;

  StateList items(const PickleValue& value) const {
    StateList items;
    for (const auto& item : value.items()) items.push_back((*this)(item));
    return items;
  }
  StateDict dict(const PickleValue& value) const {
    StateDict dict;
    for (size_t i = 0; i < value.dict_size(); ++i) {
      const auto& key = value.key(i);
      dict.set(key.kind() == PickleKind::kInt ? StateKey(key.as_int()) : StateKey(key.as_text()),
               (*this)(value.value(i)));
    }
    return dict;
  }
  StateValue operator()(const PickleValue& value) const {
    switch (value.kind()) {
      case PickleKind::kNone:
        return {};
      case PickleKind::kBool:
        return value.as_bool();
      case PickleKind::kInt:
        return value.as_int();
      case PickleKind::kFloat:
        return value.as_float();
      case PickleKind::kText:
        return value.as_text();
      case PickleKind::kBytes:
        return StateBytes{value.as_bytes()};
      case PickleKind::kList:
        return items(value);
      case PickleKind::kTuple:
        return StateTuple{items(value)};
      case PickleKind::kDict:
        return dict(value);
      // A persistent value stands for a tensor, which the function `tensor` makes. If no function `tensor` is given, a
      // persistent value is an error.
      case PickleKind::kPersistent:
        if (tensor) return tensor(value.persistent_id());
        [[fallthrough]];
      default:
        raise(ErrorKind::kFormat, "[state.unpickle] {}: found {}, which no state dict holds", quote(name),
              value.describe());
    }
  }
};

}  // namespace

PickleValue to_pickle(const StateValue& value, const PickleTensor& tensor) {
  return std::visit(ToPickle{tensor}, value.variant());
}

StateValue from_pickle(const PickleValue& value, const std::string& name, const UnpickleTensor& tensor) {
  return FromPickle{name, tensor}(value);
}

}  // namespace tessera
