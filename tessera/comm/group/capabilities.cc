#include "tessera/comm/group/capabilities.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera::comm {

// NCCL's back-end is a class of libtorch and cannot implement HasCapabilities, so it is recognised by name.
Capabilities capabilities_of(const c10d::Backend& backend) {
  const auto* more = dynamic_cast<const HasCapabilities*>(&backend);
  if (more) return more->capabilities();
  return {.reduces = false, .scatters_sums = backend.getBackendName() == "nccl"};
}

}  // namespace tessera::comm
