// The loops of row_loops.h on tensors of CUDA: the same arguments, roundings and results, on the current stream
// of their device. Sums have one order, whatever the GPU, but another one than the CPU's.
#pragma once

#include "tessera/kernels/rows/row_loops.h"

namespace tessera::kernels::cuda {

// Null where this build has none.
const RowLoops* row_twins();

}  // namespace tessera::kernels::cuda
