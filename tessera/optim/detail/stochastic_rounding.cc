#include "tessera/optim/detail/stochastic_rounding.h"

#include <ATen/ATen.h>

#include "tessera/base/philox.h"
#include "tessera/optim/detail/region.h"

namespace tessera::optim::detail {
namespace {

constexpr int64_t kDroppedBits = 16;

}  // namespace

void round_stochastically(const at::Tensor& into, const at::Tensor& values, const at::Tensor& parameter, uint64_t seed,
                          std::string_view name, int64_t step) {
  if (into.numel() == 0) return;
  const auto bits = at::empty(values.sizes(), values.options().dtype(at::kInt));
  const tessera::RandomStreamKey key{.seed = seed ^ philox_stream(name), .operation = static_cast<uint64_t>(step)};
  tessera::fill_random(bits, region_of(parameter), key,
                       {.kind = tessera::DistributionKind::kInteger, .low = 0, .range = uint64_t{1} << kDroppedBits});
  // bfloat16 is the upper 16 bits of float32. Adding a random 16-bit number to the lower bits carries into the upper
  // bits with probability (lower bits) / 2^16; then the lower bits are cleared.
  bits.add_(values.contiguous().view(at::kInt)).bitwise_and_(-(int64_t{1} << kDroppedBits));
  into.copy_(at::where(values.isfinite(), bits.view(at::kFloat), values));
}

}  // namespace tessera::optim::detail
