// Computes how many tokens of KV cache fit into memory.
//
//   const int64_t tokens = cache_tokens(*model, 8 * model->config().context_tokens);
//   Engine engine(model, {.pages = Engine::pages_for(tokens)});
//
// Call these functions after the weights are loaded. No communication. When several ranks share a model, the caller
// must take the minimum of their results.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "tessera/models/decoder/causal_lm.h"

namespace tessera {

struct AvailableMemory;

// Returns the free bytes of an accelerator, after its allocator has released unused memory. Returns nullopt for the
// CPU, and for an allocator that does not report its memory.
std::optional<int64_t> free_device_bytes(c10::Device device);

// Returns the size of a KV cache in tokens: the larger of `requested_tokens` and one whole context, but at most what
// fits into the memory for the cache. At least one page counts as fitting. On an accelerator this memory is three
// quarters of the free memory, and pages have the model's dtype; their size is divided by `ranks`, the number of ranks
// over which the model's heads are sharded. On the CPU, and when the free memory is unknown, this memory is
// cache_bytes_within(), and pages are float32 and not divided.
int64_t cache_tokens(CausalLM& model, int64_t requested_tokens, int64_t ranks = 1);

// Returns the bytes for a cache in the CPU's memory: a quarter of the memory that the process may use, but at most
// three quarters of the memory that the weights and other processes leave free.
int64_t cache_bytes_within(const AvailableMemory& memory);

// Checks a cache of `tokens` before it is made; a page takes `page_bytes` of the CPU's memory. Error kConfig when the
// cache is larger than the memory that this process may use; a warning when it is larger than the free memory. The
// check is needed because the system allocates memory at the first write, so it would refuse later, by killing the
// process.
void check_cache_fits(const AvailableMemory& memory, int64_t tokens, int64_t page_bytes);

struct CacheMemory {
  int64_t bytes = 0;
  int64_t page_bytes = 1;  // of a page of kernels::kPageTokens tokens
};
int64_t cache_tokens_within(const CacheMemory& memory, int64_t context, int64_t requested_tokens);

}  // namespace tessera
