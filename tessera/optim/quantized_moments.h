// Moments of an optimizer in 8 bits: codes of a map of 256 values, and a scale for each block of elements.
//
//   const at::Tensor map = dynamic_map(/*is_signed=*/true);
//   at::Tensor moment = dequantized(codes, scale, map, region_of(parameter));
//   at::Tensor largest = at::zeros_like(scale);
//   add_block_maxima(moment, region, largest);                        // then the maximum over ranks
//   quantize(moment, largest, map, region, codes, scale);
//
// Blocks are of kMomentBlock elements of the whole parameter, flattened; a rank's part may hold pieces of some. Codes
// lie as the parameter does, scales are whole on every rank. No communication. As torchao's OptimState8bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/optim/detail/region.h"

namespace tessera::optim {

inline constexpr int64_t kMomentBlock = 256;

// Whether a parameter of so many elements has its moments in 8 bits: at least 4096, and whole blocks.
bool is_quantized(int64_t numel);

// Error kConfig: there are no moments of 8 bits there.
void check_moments_may_lie_on(c10::Device device, const std::string& parameter);

// 256 rising values in [-1, 1], or [0, 1]: the dynamic map of bitsandbytes, float32.
at::Tensor dynamic_map(bool is_signed);

// float32, shaped as codes.
at::Tensor dequantized(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& map,
                       const tessera::Region& region);
// The largest |value| of each block into `largest`, where it is larger than what is there.
void add_block_maxima(const at::Tensor& values, const tessera::Region& region, const at::Tensor& largest);
// The code nearest to each value over its block's scale, which is `largest`, but at least 1e-12.
void quantize(const at::Tensor& values, const at::Tensor& largest, const at::Tensor& map, const tessera::Region& region,
              const at::Tensor& codes, const at::Tensor& scale);

// Zeros for a state of a parameter whose part here is `local`: *_codes is uint8, *_scale has a float32 for each block,
// others are like `local` with these options.
at::Tensor new_state(std::string_view name, const at::Tensor& parameter, const at::Tensor& local,
                     const at::TensorOptions& options);
// Of the whole parameter on every rank, not a part of it: *_scale.
bool is_whole_state(std::string_view name);
// A tensor shaped and placed as the state of a parameter is that has none yet: the parameter itself, for *_scale one on
// the meta device.
at::Tensor state_form(std::string_view name, const at::Tensor& parameter);

}  // namespace tessera::optim
