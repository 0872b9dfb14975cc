#include "tessera/kernels/detail/row_kernels.h"

#include "tessera/kernels/detail/vector_level.h"

namespace tessera::detail {

const RowKernels& row_kernels() {
  switch (vector_level()) {
    case VectorLevel::kAvx512:
      return avx512_row_kernels();
    case VectorLevel::kAvx2:
      return avx2_row_kernels();
    case VectorLevel::kPlain:
      break;
  }
  return plain_row_kernels();
}

}  // namespace tessera::detail
