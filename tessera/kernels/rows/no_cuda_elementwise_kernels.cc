// Builds without nvcc or with a libtorch without CUDA have no CUDA loops; the kernels run as libtorch operations there.
#include "tessera/kernels/rows/row_twins.h"

namespace tessera::kernels::cuda {

const RowLoops* row_twins() { return nullptr; }

}  // namespace tessera::kernels::cuda
