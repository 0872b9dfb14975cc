#include "tessera/nn/attention/kv_cache.h"

#include "tessera/base/error.h"

namespace tessera::nn {

KvCache::KvCache(int64_t layers, int64_t capacity_tokens)
    : layers_(static_cast<size_t>(layers)), capacity_(capacity_tokens) {}

std::pair<at::Tensor, at::Tensor> KvCache::append(int64_t layer, const at::Tensor& keys, const at::Tensor& values) {
  const int64_t added = keys.size(2);
  TESSERA_CHECK(length_ + added <= capacity_, ErrorKind::kShape,
                "[nn.kv_cache] {} tokens after {} do not fit into a cache for {}. Make it larger.", added, length_,
                capacity_);
  auto& [stored_keys, stored_values] = layers_.at(static_cast<size_t>(layer));
  if (!stored_keys.defined()) {
    const std::vector<int64_t> sizes = {keys.size(0), keys.size(1), capacity_, keys.size(3)};
    stored_keys = at::empty(sizes, keys.options());
    stored_values = at::empty(sizes, values.options());
  }
  TESSERA_CHECK(stored_keys.size(0) == keys.size(0), ErrorKind::kShape,
                "[nn.kv_cache] found a batch of {} rows, the cache holds {}", keys.size(0), stored_keys.size(0));
  at::NoGradGuard no_grad;
  stored_keys.narrow(2, length_, added).copy_(keys);
  stored_values.narrow(2, length_, added).copy_(values);
  return {stored_keys.narrow(2, 0, length_ + added), stored_values.narrow(2, 0, length_ + added)};
}

}  // namespace tessera::nn
