// 8-bit moments of an optimizer: each moment is stored as a code, the index of one of 256 values (the map), and each
// block of elements has a scale.
//
//   const at::Tensor map = dynamic_map(/*is_signed=*/true);
//   at::Tensor moment = dequantized(codes, scale, map, region_of(parameter));
//   at::Tensor largest = at::zeros_like(scale);
//   add_block_maxima(moment, region, largest);                        // then all-reduce `largest` by its maximum
//   quantize(moment, largest, map, region, codes, scale);
//
// Blocks have kMomentBlock elements of the whole flattened parameter; a rank's shard may hold parts of blocks. Codes
// have the parameter's placements, scales are whole on every rank. No communication. The format is that of torchao's
// OptimState8bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/optim/detail/region.h"

namespace tessera::optim {

inline constexpr int64_t kMomentBlock = 256;

// Returns whether a parameter of this size has 8-bit moments: at least 4096 elements, and a multiple of kMomentBlock.
bool is_quantized(int64_t numel);

// Checks that 8-bit moments are supported on `device`; Error kConfig if not. `parameter` is the parameter's name for
// the message.
void check_moment_device(c10::Device device, const std::string& parameter);

// 256 ascending values in [-1, 1], or [0, 1]: the dynamic map of bitsandbytes, float32.
at::Tensor dynamic_map(bool is_signed);

// Returns the decoded moments, map[code] * scale of the block, float32 in the shape of `codes`. `region`: the elements
// of the parameter that this rank holds.
at::Tensor dequantized(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& map,
                       const tessera::ShardRegion& region);
// Raises each element of `largest`, one per block, to the largest |value| of the block if that is larger.
void add_block_maxima(const at::Tensor& values, const tessera::ShardRegion& region, const at::Tensor& largest);
// Sets the scale of each block to the block's element of `largest`, but at least to 1e-12. Sets each code to the index
// of the entry of `map` that is nearest to value / scale, with the scale of the value's block.
void quantize(const at::Tensor& values, const at::Tensor& largest, const at::Tensor& map,
              const tessera::ShardRegion& region, const at::Tensor& codes, const at::Tensor& scale);

// Returns zeros for the state `name` of a parameter whose local part is `local`: uint8 for *_codes, one float32 per
// block for *_scale, and a tensor like `local` with `options` for other names.
at::Tensor new_state(std::string_view name, const at::Tensor& parameter, const at::Tensor& local,
                     const at::TensorOptions& options);
// Returns whether every rank holds all elements of the state `name` of a DTensor parameter. This is true for *_scale;
// other states are sharded like the parameter.
bool is_replicated_state(std::string_view name);
// Returns a tensor with the shape and placements of a state that does not exist yet: the parameter itself, or for
// *_scale a meta tensor.
at::Tensor state_template(std::string_view name, const at::Tensor& parameter);

}  // namespace tessera::optim
