#include "tessera/kernels/linear/q4_blocks.h"

#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>

namespace tessera::kernels {
namespace {

constexpr size_t kElements = Q4Block::kElements, kHalf = kElements / 2;

}  // namespace

bool to_q4_blocks(std::span<const float> values, std::span<Q4Block> blocks) {
  for (size_t at = 0; at < blocks.size(); ++at) {
    const auto own = values.subspan(at * kElements, kElements);
    auto& block = blocks[at];
    float least = own[0], most = own[0];
    for (const float value : own) {
      if (!std::isfinite(value)) return false;
      least = std::min(least, value);
      most = std::max(most, value);
    }
    block.d = c10::detail::fp16_ieee_from_fp32_value((most - least) / 15.0F);
    block.m = c10::detail::fp16_ieee_from_fp32_value(least);
    const float d = c10::detail::fp16_ieee_to_fp32_value(block.d), m = c10::detail::fp16_ieee_to_fp32_value(block.m);
    if (!std::isfinite(d) || !std::isfinite(m)) return false;
    const auto code = [&](float value) {
      return d == 0 ? uint8_t{0} : static_cast<uint8_t>(std::clamp(std::nearbyint((value - m) / d), 0.0F, 15.0F));
    };
    for (size_t i = 0; i < kHalf; ++i) block.codes[i] = static_cast<uint8_t>(code(own[i]) | code(own[kHalf + i]) << 4);
  }
  return true;
}

}  // namespace tessera::kernels
