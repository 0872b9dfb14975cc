#include "tessera/optim/quantized_moments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/kernels/linear/dynamic_map.h"

namespace tessera::optim {
namespace {

// Divides the shard `region` of a parameter into runs of elements. The elements of a run are consecutive in this rank's
// local tensor and lie in one block of kMomentBlock elements of the whole flattened parameter. Calls visit(local,
// count, block) for each run, from several threads: `local` is the index of the run's first element in the local
// tensor, `count` its number of elements, and `block` the index of the block.
template <class Visit>
void for_each_block_part(const ShardRegion& region, const Visit& visit) {
  tessera::for_each_contiguous_range(region, [&](int64_t local, int64_t global, int64_t count) {
    while (count > 0) {
      const int64_t part = std::min(count, kMomentBlock - global % kMomentBlock);
      visit(local, part, global / kMomentBlock);
      local += part;
      global += part;
      count -= part;
    }
  });
}

void check_on_cpu(const at::Tensor& tensor) {
  TESSERA_CHECK(
      tensor.is_cpu() && tensor.is_contiguous(), ErrorKind::kConfig,
      "[optim.adamw8bit] found moments on {}, wanted contiguous moments on the CPU: this version has no 8-bit "
      "moments on other devices. Use optimizer.name=adamw.",
      tensor.device().str());
}

// Atomic maximum of non-negative floats: their bit patterns have the order of their values, and NaN is above all. Two
// threads may process elements of the same block.
void atomic_max(float& target, float value) {
  std::atomic_ref<uint32_t> bits(reinterpret_cast<uint32_t&>(target));
  const auto value_bits = std::bit_cast<uint32_t>(value);
  uint32_t current = bits.load(std::memory_order_relaxed);
  while (current < value_bits && !bits.compare_exchange_weak(current, value_bits, std::memory_order_relaxed)) {
  }
}

}  // namespace

void check_moment_device(c10::Device device, const std::string& parameter) {
  TESSERA_CHECK(device.is_cpu(), ErrorKind::kConfig,
                "[optim.make_adamw8bit] {}: found a parameter on {}, wanted one on the CPU: this version has no 8-bit "
                "moments on other devices. Use optimizer.name=adamw.",
                parameter, device.str());
}

bool is_quantized(int64_t numel) { return numel >= 4096 && numel % kMomentBlock == 0; }

at::Tensor dynamic_map(bool is_signed) { return kernels::dynamic_map(is_signed); }

at::Tensor dequantized(const at::Tensor& codes, const at::Tensor& scale, const at::Tensor& map,
                       const ShardRegion& region) {
  check_on_cpu(codes);
  const auto out = at::empty(codes.sizes(), codes.options().dtype(at::kFloat));
  const auto* from = codes.const_data_ptr<uint8_t>();
  const auto* scales = scale.const_data_ptr<float>();
  const auto* values = map.const_data_ptr<float>();
  auto* to = out.mutable_data_ptr<float>();
  for_each_block_part(region, [=](int64_t local, int64_t count, int64_t block) {
    for (int64_t i = local; i < local + count; ++i) to[i] = values[from[i]] * scales[block];
  });
  return out;
}

void add_block_maxima(const at::Tensor& values, const ShardRegion& region, const at::Tensor& largest) {
  check_on_cpu(values);
  const auto* from = values.const_data_ptr<float>();
  auto* to = largest.mutable_data_ptr<float>();
  for_each_block_part(region, [=](int64_t local, int64_t count, int64_t block) {
    // A NaN counts as the largest value, so the block's scale becomes NaN and the error stays visible.
    float maximum = 0;
    for (int64_t i = local; i < local + count; ++i) {
      const float size = std::fabs(from[i]);
      maximum = size > maximum || std::isnan(size) ? size : maximum;
    }
    atomic_max(to[block], maximum);
  });
}

void quantize(const at::Tensor& values, const at::Tensor& largest, const at::Tensor& map, const ShardRegion& region,
              const at::Tensor& codes, const at::Tensor& scale) {
  check_on_cpu(codes);
  scale.copy_(largest.clamp_min(1e-12));
  const auto* from = values.const_data_ptr<float>();
  const auto* scales = scale.const_data_ptr<float>();
  const auto* steps = map.const_data_ptr<float>();
  auto* to = codes.mutable_data_ptr<uint8_t>();
  for_each_block_part(region, [=](int64_t local, int64_t count, int64_t block) {
    for (int64_t i = local; i < local + count; ++i) to[i] = kernels::nearest_in_map(steps, from[i] / scales[block]);
  });
}

at::Tensor new_state(std::string_view name, const at::Tensor& parameter, const at::Tensor& local,
                     const at::TensorOptions& options) {
  if (is_replicated_state(name)) return at::zeros({parameter.numel() / kMomentBlock}, options.dtype(at::kFloat));
  if (name.ends_with("_codes")) return at::zeros(local.sizes(), options.dtype(at::kByte));
  return at::zeros_like(local, options);
}

bool is_replicated_state(std::string_view name) { return name.ends_with("_scale"); }

at::Tensor state_template(std::string_view name, const at::Tensor& parameter) {
  if (!is_replicated_state(name)) return parameter;
  return at::empty({parameter.numel() / kMomentBlock}, at::TensorOptions(at::kFloat).device(at::kMeta));
}

}  // namespace tessera::optim
