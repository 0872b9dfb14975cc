// CUDA graphs, if this program was built with CUDA.
#pragma once

#include "tessera/mesh/device_graph.h"

namespace tessera::detail {

// Returns the function that makes graph pools for CUDA devices; null in a program without CUDA.
GraphPoolFactory cuda_graph_pool_factory();

}  // namespace tessera::detail
