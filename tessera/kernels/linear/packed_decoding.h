// Decodes packed weights with operations of libtorch, on any device. The values are bitwise those of the CPU's
// decoders. Thread-safe; no communication.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/formats/gguf/gguf_quants.h"

namespace tessera::kernels {

// codes: uint8, two codes per byte, the first in the upper four bits. scales: float32, one per `block` codes; the last
// block may be shorter. table: float32 [16]. Returns table[code] * scale for the first `count` codes, float32 [count].
at::Tensor decode_codes(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& table, int64_t block,
                        int64_t count);
// Decodes `bytes`, uint8 [rows, bytes of a row], to float32 [rows, in]. A row is a whole number of blocks of the
// format.
at::Tensor decode_gguf_rows(GgmlType type, const at::Tensor& bytes, int64_t in);

}  // namespace tessera::kernels
