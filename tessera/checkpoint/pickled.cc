#include "tessera/checkpoint/pickled.h"

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

PickleValue::Items to_pickle_items(const StateList& values) {
  PickleValue::Items items;
  for (const auto& value : values) items.push_back(to_pickle(value));
  return items;
}

StateList from_pickle_items(const PickleValue& value, const std::string& name) {
  StateList items;
  for (const auto& item : value.items()) items.push_back(from_pickle(item, name));
  return items;
}

struct ToPickle {
  PickleValue operator()(std::monostate) const { return {}; }
  PickleValue operator()(bool value) const { return value; }
  PickleValue operator()(int64_t value) const { return value; }
  PickleValue operator()(double value) const { return value; }
  PickleValue operator()(const std::string& value) const { return value; }
  PickleValue operator()(const StateBytes& value) const { return PickleValue::bytes(value.bytes); }
  PickleValue operator()(const StateList& value) const { return PickleValue::list(to_pickle_items(value)); }
  PickleValue operator()(const StateTuple& value) const { return PickleValue::tuple(to_pickle_items(value.items)); }
  PickleValue operator()(const StateDict& value) const {
    std::vector<PickleValue::Pair> pairs;
    for (const auto& [key, each] : value) {
      const auto* number = std::get_if<int64_t>(&key);
      pairs.emplace_back(number ? PickleValue(*number) : PickleValue(std::get<std::string>(key)), to_pickle(each));
    }
    return PickleValue::dict(std::move(pairs));
  }
  template <class T>
  PickleValue operator()(const T&) const {
    raise(ErrorKind::kShape, "[checkpoint.save] a tensor inside an object; a tensor is saved under a name of its own");
  }
};

}  // namespace

PickleValue to_pickle(const StateValue& value) { return std::visit(ToPickle{}, value.variant()); }

StateValue from_pickle(const PickleValue& value, const std::string& name) {
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
      return from_pickle_items(value, name);
    case PickleKind::kTuple:
      return StateTuple{from_pickle_items(value, name)};
    case PickleKind::kDict: {
      StateDict dict;
      for (size_t i = 0; i < value.dict_size(); ++i) {
        const auto& key = value.key(i);
        StateKey own;
        if (key.kind() == PickleKind::kInt) own = key.as_int();
        if (key.kind() != PickleKind::kInt) own = key.as_text();
        dict.set(std::move(own), from_pickle(value.value(i), name));
      }
      return dict;
    }
    default:
      raise(ErrorKind::kFormat, "[checkpoint.load] {}: found {}, which no state dict holds", quote(name),
            value.describe());
  }
}

}  // namespace tessera
