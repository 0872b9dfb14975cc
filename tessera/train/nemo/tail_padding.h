// How much of a batch is padding at the end of its rows.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>

namespace tessera::train {

// Of labels [rows, length, ...], integers: elements from which on, along dim 1, all are ignore_label. A row of nothing
// else counts in full. Semantics of NeMo AutoModel's count_tail_padding. Error kShape for fewer than two dims. No
// communication, no gradient.
int64_t count_tail_padding(const at::TensorBase& labels, int64_t ignore_label = -100);

}  // namespace tessera::train
