#include "tessera/mesh/detail/cuda_graphs.h"

namespace tessera::detail {

GraphMemoryMaker cuda_graph_memory() { return nullptr; }

}  // namespace tessera::detail
