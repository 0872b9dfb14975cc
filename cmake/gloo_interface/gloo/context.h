// What c10d's ProcessGroupGloo.hpp needs of Gloo, declared: the libtorch wheel carries Gloo's code but not its
// headers. Only pointers to these types and calls of exported functions cross the line, never a layout.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "gloo/transport/device.h"

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

}  // namespace gloo
