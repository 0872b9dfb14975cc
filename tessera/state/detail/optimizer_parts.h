// The two parts of an optimizer's dict put together. A StateDict's list of items would copy both trees.
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
