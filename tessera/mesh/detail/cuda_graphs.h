// CUDA's graphs, where this program was built for it.
#pragma once

#include "tessera/mesh/device_graph.h"

namespace tessera::detail {

// Null: it was not.
GraphMemoryMaker cuda_graph_memory();

}  // namespace tessera::detail
