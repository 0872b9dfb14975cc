// Labels that are no class.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>

namespace at {
class Tensor;
}

namespace tessera::kernels {

// The first of the labels (int64, of any shape) that is neither kIgnoredLabel nor one of the classes: its place in the
// flattened labels; -1: there is none. Waits for a device on which they lie.
int64_t first_wrong_label(const at::Tensor& labels, int64_t classes);

}  // namespace tessera::kernels
