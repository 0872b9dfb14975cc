// Counts the padding at the end of the rows of a batch.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>

namespace tessera::train {

// The number of elements of integer labels [rows, length, ...] that are in a tail of ignore_label along dim 1. A row
// that holds only ignore_label counts with its whole length. Semantics of NeMo AutoModel's count_tail_padding. Error
// kShape for fewer than two dims. No communication, no gradient.
int64_t count_tail_padding(const at::TensorBase& labels, int64_t ignore_label = -100);

}  // namespace tessera::train
