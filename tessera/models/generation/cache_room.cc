#include "tessera/models/generation/cache_room.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <algorithm>

#include "tessera/kernels/paged_attention.h"
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

int64_t cache_tokens_within(const CacheRoom& room, int64_t context, int64_t wanted) {
  const int64_t held = room.bytes / room.page_bytes * kPageTokens;
  return std::min(std::max(wanted, context), std::max<int64_t>(held, kPageTokens));
}

int64_t cache_tokens(CausalLM& model, int64_t wanted, int64_t ranks) {
  const auto& config = model.config();
  const auto weight = model.parameters().front();
  CacheRoom room;
  if (const auto free = free_device_bytes(weight.device())) {
    room = {.bytes = *free / 4 * 3,  // the rest is for what a step computes
            .page_bytes = Engine::page_bytes(config, weight.element_size()) / ranks};
  } else {
    const int64_t memory = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGE_SIZE);
    room = {.bytes = memory / 4, .page_bytes = Engine::page_bytes(config, sizeof(float))};
  }
  return cache_tokens_within(room, config.context_tokens, wanted);
}

}  // namespace tessera
