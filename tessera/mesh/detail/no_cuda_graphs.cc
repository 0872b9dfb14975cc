#include "tessera/mesh/detail/cuda_graphs.h"

namespace tessera::detail {

GraphPoolFactory cuda_graph_pool_factory() { return nullptr; }

}  // namespace tessera::detail
