// The loops of elementwise_kernels.h for CUDA tensors: the same arguments and roundings, on the current stream of the
// tensors' device. Sums have the same order on every GPU, but not the order of the CPU's sums.
#pragma once

#include "tessera/kernels/rows/elementwise_kernels.h"

namespace tessera::kernels::cuda {

// Returns null if this build has no CUDA kernels.
const ElementwiseKernels* cuda_elementwise_kernels();

}  // namespace tessera::kernels::cuda
