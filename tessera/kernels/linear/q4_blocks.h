// Weights to blocks of Q4_1; formats/gguf/gguf_quants.h decodes them.
#pragma once

#include <span>

#include "tessera/kernels/simd/row_kernels.h"

namespace tessera::kernels {

// values: whole blocks. The scale is the range of a block in 15 steps, rounded to fp16, so that what came from a Q4_1
// file goes back to the same values. False where a block holds what fp16 cannot: no finite number, or beyond 65504.
bool to_q4_blocks(std::span<const float> values, std::span<Q4Block> blocks);

}  // namespace tessera::kernels
