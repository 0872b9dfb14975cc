#include "tessera/models/generation/cache_memory.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/available_memory.h"
#include "tessera/kernels/attention/paged_attention.h"
#include "tessera/models/generation/engine.h"

namespace tessera {

std::optional<int64_t> free_device_bytes(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr) return std::nullopt;
  try {
    allocator->emptyCache();
    return static_cast<int64_t>(allocator->getMemoryInfo(device.index()).first);
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  }
}

// The cache takes at most a quarter of the memory that the process may use, and leaves a quarter of the free memory
// free.
int64_t cache_bytes_within(const AvailableMemory& memory) {
  return std::min(memory.total_bytes() / 4, memory.available_bytes() / 4 * 3);
}

int64_t cache_tokens_within(const CacheMemory& memory, int64_t context, int64_t requested_tokens) {
  const int64_t fitting_tokens = memory.bytes / memory.page_bytes * kernels::kPageTokens;
  return std::min(std::max(requested_tokens, context), std::max<int64_t>(fitting_tokens, kernels::kPageTokens));
}

int64_t cache_tokens(CausalLM& model, int64_t requested_tokens, int64_t ranks) {
  const auto& config = model.config();
  const auto weight = model.parameters().front();
  CacheMemory memory;
  if (const auto free = free_device_bytes(weight.device())) {
    memory = {.bytes = *free / 4 * 3,  // the rest is for the activations of a step
              .page_bytes = Engine::page_bytes(config, weight.element_size()) / ranks};
  } else {
    memory = {.bytes = cache_bytes_within(read_available_memory()),
              .page_bytes = Engine::page_bytes(config, sizeof(float))};
  }
  return cache_tokens_within(memory, config.context_tokens, requested_tokens);
}

void check_cache_fits(const AvailableMemory& memory, int64_t tokens, int64_t page_bytes) {
  constexpr double kGiB = 1 << 30;
  const double needed = static_cast<double>(Engine::pages_for(tokens)) * static_cast<double>(page_bytes) / kGiB;
  const double usable = static_cast<double>(memory.total_bytes()) / kGiB;
  const double left = static_cast<double>(memory.available_bytes()) / kGiB;
  TESSERA_CHECK(
      needed <= usable, ErrorKind::kConfig,
      "[models.generation] a cache of {} tokens takes {:.1f} GiB, found {:.1f} GiB that this process may use. "
      "Give fewer --cache-tokens.",
      tokens, needed, usable);
  if (needed <= left) return;
  log_warning(
      "[models.generation] a full cache of {} tokens takes {:.1f} GiB, {:.1f} GiB are free now. Give fewer "
      "--cache-tokens.",
      tokens, needed, left);
}

}  // namespace tessera
