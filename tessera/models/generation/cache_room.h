// How many tokens' keys and values there is room for where a model lies.
//
//   const int64_t tokens = cache_tokens(*model, 8 * model->config().context_tokens);
//   Engine engine(model, {.pages = Engine::pages_for(tokens)});
//
// Asked when the weights lie there. No communication: ranks that hold a model together take the least of theirs.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

struct MemoryRoom;

// What is free on an accelerator, once its allocator has given back what nobody uses. Nothing for the CPU, and for one
// whose allocator does not say.
std::optional<int64_t> free_device_bytes(c10::Device device);

// Tokens that a cache should hold: as wanted, but at least one whole context, and within three quarters of the free
// memory of the model's accelerator, in its dtype; where that is not known, and on the CPU, within cache_bytes_within,
// in float32. At least a page. ranks: among which the model's heads are cut.
int64_t cache_tokens(CausalLM& model, int64_t wanted, int64_t ranks = 1);

// Bytes of a cache in the CPU's memory: a quarter of what the process may use, and at most three quarters of what is
// left of it beside the weights and other processes.
int64_t cache_bytes_within(const MemoryRoom& memory);

// Before a cache of `tokens`, of which a page takes `page_bytes` of the CPU's memory, is made: error kConfig where it
// is larger than what this process may use, a warning where it is larger than what is left. The system gives memory at
// the first touch, so that its own refusal would come later and end the process.
void check_cache_fits(const MemoryRoom& memory, int64_t tokens, int64_t page_bytes);

struct CacheRoom {
  int64_t bytes = 0;
  int64_t page_bytes = 1;  // of kernels::kPageTokens tokens
};
int64_t cache_tokens_within(const CacheRoom& room, int64_t context, int64_t wanted);

}  // namespace tessera
