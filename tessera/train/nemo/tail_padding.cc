#include "tessera/train/nemo/tail_padding.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"

namespace tessera::train {

int64_t count_tail_padding(const at::TensorBase& labels, int64_t ignore_label) {
  TESSERA_CHECK(labels.dim() >= 2, ErrorKind::kShape,
                "[train.count_tail_padding] labels: found {} dims, wanted [rows, length]", labels.dim());
  const at::NoGradGuard no_grad;
  // Rows are reversed. In a reversed row cumprod() gives 1 for all elements before the first label that is not
  // ignore_label, and 0 for all elements from this label on.
  const at::Tensor padding = at::Tensor(labels).flip({1}).eq(ignore_label);
  return padding.cumprod(1, at::kLong).sum().item<int64_t>();
}

}  // namespace tessera::train
