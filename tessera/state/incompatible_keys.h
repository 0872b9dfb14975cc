// What loading a state dict found beside what it was for.
#pragma once

#include <string>
#include <vector>

namespace tessera {

struct IncompatibleKeys {
  std::vector<std::string> missing;     // in the dict
  std::vector<std::string> unexpected;  // that the model does not know
};

}  // namespace tessera
