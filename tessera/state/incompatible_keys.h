// The keys that only the model has or only the loaded state dict has, as returned by PyTorch's load_state_dict.
#pragma once

#include <string>
#include <vector>

namespace tessera {

struct IncompatibleKeys {
  std::vector<std::string> missing_keys;     // names of the model that the dict does not have
  std::vector<std::string> unexpected_keys;  // keys of the dict that the model does not have
};

}  // namespace tessera
