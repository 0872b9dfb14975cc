// Builds an optimizer's dict from the values of "state" and "param_groups". Both values are moved into the dict; an
// initializer list of StateDict would copy them.
#pragma once

#include <utility>

#include "tessera/state/state_value.h"

namespace tessera::detail {

inline StateDict optimizer_dict_of(StateDict state, StateList param_groups) {
  StateDict dict;
  dict.set("state", std::move(state));
  dict.set("param_groups", std::move(param_groups));
  return dict;
}

}  // namespace tessera::detail
