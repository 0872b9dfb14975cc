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

#include "tessera/models/causal_lm.h"

namespace tessera {

// What is free on an accelerator, once its allocator has given back what nobody uses. Nothing for the CPU, and for one
// whose allocator does not say.
std::optional<int64_t> free_device_bytes(c10::Device device);

// Tokens that a cache should hold: as wanted, but at least one whole context, and within three quarters of what is free
// on the model's accelerator, in its dtype; where that is not known, and on the CPU, within a quarter of this machine's
// memory, in float32. At least a page. ranks: among which the model's heads are cut.
int64_t cache_tokens(CausalLM& model, int64_t wanted, int64_t ranks = 1);

struct CacheRoom {
  int64_t bytes = 0;
  int64_t page_bytes = 1;  // of kPageTokens tokens
};
int64_t cache_tokens_within(const CacheRoom& room, int64_t context, int64_t wanted);

}  // namespace tessera
