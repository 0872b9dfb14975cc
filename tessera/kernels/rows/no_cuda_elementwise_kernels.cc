// Builds without nvcc or with a libtorch without CUDA have no CUDA loops; the kernels run as libtorch operations there.
#include "tessera/kernels/rows/cuda_elementwise_kernels.h"

namespace tessera::kernels::cuda {

const ElementwiseKernels* cuda_elementwise_kernels() { return nullptr; }

}  // namespace tessera::kernels::cuda
