// Values of state dicts that rapidcheck draws.
#pragma once

#include <ATen/ops/full.h>
#include <rapidcheck.h>

#include "tessera/state/state_value.h"

namespace tessera::testing {

inline at::Tensor drawn_tensor() {
  const auto shape = *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 3));
  const auto few = std::vector<int64_t>(shape.begin(), shape.begin() + std::min<ptrdiff_t>(3, std::ssize(shape)));
  const auto dtype = *rc::gen::element(at::kFloat, at::kDouble, at::kBFloat16, at::kLong, at::kBool);
  return at::full(few, *rc::gen::inRange(0, 100), dtype);
}

inline StateValue drawn_value(int depth);

inline std::string drawn_text() { return *rc::gen::container<std::string>(rc::gen::inRange<char>(0, 127)); }

inline StateList drawn_items(int depth) {
  StateList items;
  for (int i = *rc::gen::inRange(0, 4); i > 0; --i) items.push_back(drawn_value(depth - 1));
  return items;
}

// Keys have no dots; some keys are numbers.
inline StateDict drawn_dict(int depth) {
  StateDict dict;
  for (int i = *rc::gen::inRange(0, 4); i > 0; --i) {
    const StateKey key = *rc::gen::arbitrary<bool>() ? StateKey(int64_t{*rc::gen::inRange(-3, 3)})
                                                     : StateKey("k" + std::to_string(*rc::gen::inRange(0, 6)));
    dict.set(key, drawn_value(depth - 1));
  }
  return dict;
}

inline StateValue drawn_value(int depth) {
  switch (*rc::gen::inRange(0, depth > 0 ? 10 : 7)) {
    case 0:
      return {};
    case 1:
      return *rc::gen::arbitrary<bool>();
    case 2:
      return *rc::gen::arbitrary<int64_t>();
    case 3:
      return static_cast<double>(*rc::gen::arbitrary<int>()) / 7;
    case 4:
      return drawn_text();
    case 5:
      return StateBytes{*rc::gen::string<std::string>()};
    case 6:
      return drawn_tensor();
    case 7:
      return drawn_items(depth);
    case 8:
      return StateTuple{drawn_items(depth)};
    default:
      return drawn_dict(depth);
  }
}

}  // namespace tessera::testing
