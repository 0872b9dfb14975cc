// Writes a tree of values as a pickle that Python reads.
//
//   const std::string data_pkl = pickle(root, {.protocol = 2});     // what torch.load(weights_only=True) accepts
//   const std::string metadata = pickle(root, {.protocol = 4});
//
// The same tree gives the same bytes. Repeated texts and names are memo references; any other shared value is written
// out once per reference. Error kFormat for a name outside the list of pickle_names.h and for values nested more than
// 90 deep. Pure, thread-safe.
#pragma once

#include <string>

#include "tessera/formats/torch/pickle_value.h"

namespace tessera {

struct PickleOptions {
  int protocol = 4;  // 2 or 4
};

std::string pickle(const PickleValue& root, const PickleOptions& options);

}  // namespace tessera
