#include "tessera/kernels/loss/wrong_label.h"

#include <ATen/core/Tensor.h>

#include "tessera/base/ignored_label.h"

namespace tessera::kernels {

int64_t first_wrong_label(const at::Tensor& labels, int64_t classes) {
  const auto wrong = labels.ne(kIgnoredLabel).logical_and(labels.lt(0).logical_or(labels.ge(classes)));
  if (wrong.numel() == 0 || !wrong.any().item<bool>()) return -1;
  return wrong.flatten().nonzero()[0].item<int64_t>();
}

}  // namespace tessera::kernels
