#include "tessera/train/nemo/tail_padding.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"

namespace tessera::train {

int64_t count_tail_padding(const at::TensorBase& labels, int64_t ignore_label) {
  TESSERA_CHECK(labels.dim() >= 2, ErrorKind::kShape,
                "[train.count_tail_padding] labels: found {} dims, wanted [rows, length]", labels.dim());
  const at::NoGradGuard no_grad;
  // From the end of a row, the product of the flags is 1 up to the first other label and 0 from there on.
  const at::Tensor padding = at::Tensor(labels).flip({1}).eq(ignore_label);
  return padding.cumprod(1, at::kLong).sum().item<int64_t>();
}

}  // namespace tessera::train
