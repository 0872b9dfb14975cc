// The loops of row_loops.h for CUDA tensors: the same arguments and roundings, on the current stream of the tensors'
// device. Sums have the same order on every GPU, but not the order of the CPU's sums.
#pragma once

#include "tessera/kernels/rows/row_loops.h"

namespace tessera::kernels::cuda {

// Null where this build has no CUDA kernels.
const RowLoops* row_twins();

}  // namespace tessera::kernels::cuda
