// Keys and values of the tokens that a model has seen, layer by layer, for generation.
//
//   KvCache cache(layers, capacity_tokens);
//   model.logits({.tokens = prompt, .cache = &cache});      // fills it
//   model.logits({.tokens = next, .cache = &cache});        // [B, 1]: attends to everything before
//
// Memory is taken at a layer's first use, in that layer's dtype and device. One cache serves one batch of rows of equal
// length; it belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace tessera::nn {

class KvCache {
 public:
  KvCache(int64_t layers, int64_t capacity_tokens);

  int64_t length() const { return length_; }  // tokens that are complete: all layers have them
  int64_t capacity() const { return capacity_; }
  // Adds the keys and values [B, H, T, d] of the tokens after length() and returns those of all tokens so far.
  // Error kShape when they do not fit.
  std::pair<at::Tensor, at::Tensor> append(int64_t layer, const at::Tensor& keys, const at::Tensor& values);
  // The model calls this once a forward, after its last layer.
  void advance(int64_t tokens) { length_ += tokens; }
  // Forgets all but the first `length` tokens.
  void truncate(int64_t length) { length_ = std::min(length, length_); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> layers_;
  int64_t capacity_;
  int64_t length_ = 0;
};

}  // namespace tessera::nn
