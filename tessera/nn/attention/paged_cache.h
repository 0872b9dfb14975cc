// A KV cache in pages that sequences may share, and the tokens of one forward over several sequences.
//
//   PagedKVCache cache(layers, 1024);                                   // pages of kernels::kPageTokens tokens
//   PagedBatch batch(cache,
//                    {{.first_row = 0, .rows = 5, .first_position = 0, .pages = first},
//                     {.first_row = 5, .rows = 1, .first_position = 40, .pages = second}},
//                    /*logit_rows=*/{4, 5});
//   model.logits({.tokens = tokens, .positions = positions, .paged = &batch});    // tokens [1, 6]: logits [1, 2, V]
//
// The caller (models/generation) assigns pages to sequences. For fp32 on the CPU, the result of a token depends bit for
// bit only on its sequence, not on other sequences of the call (kernels/attention/paged_attention.h). On other devices
// and for other dtypes, the pages of each sequence are gathered into contiguous tensors first. Not differentiable. Not
// thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/kernels/attention/paged_attention.h"

namespace tessera::nn {

struct AttentionScoreOptions;

class PagedKVCache {
 public:
  PagedKVCache(int64_t layers, int64_t pages) : layers_(static_cast<size_t>(layers)), pages_(pages) {}
  int64_t pages() const { return pages_; }

 private:
  friend class PagedBatch;
  // One tensor per layer, [pages, 2, kv_heads, kernels::kPageTokens, head_dim]. It is allocated at the layer's first
  // use, with the keys' dtype and device, so a pipeline stage allocates only its own layers. Pages that were never
  // written take no memory on systems that map memory at the first access.
  std::vector<at::Tensor> layers_;
  int64_t pages_;
};

class PagedBatch {
 public:
  // A batch with one row for each new token of `sequences`. The rows must be in the order of `sequences`
  // (PagedSequence::first_row), and a sequence must have pages for all its tokens; otherwise Error kShape. `logit_rows`
  // are the rows whose logits are requested.
  PagedBatch(PagedKVCache& store, std::vector<kernels::PagedSequence> sequences, std::vector<int64_t> logit_rows);

  // Writes keys and values [1, N, kv_heads, head_dim] into their pages. Returns the attention of the queries [1, N,
  // heads, head_dim] over all tokens that the queries see, in the queries' shape. If queries, keys and values are
  // DTensors, their heads are sharded, and each rank's pages hold only the rank's heads. Error kShape: keys of another
  // shape or dtype than the layer's pages, or DTensors that shard another dim than the heads.
  at::Tensor attend(int64_t layer, const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                    int64_t window, const AttentionScoreOptions& scores);
  // Returns the rows logit_rows of hidden [1, N, width].
  at::Tensor select_logit_rows(const at::Tensor& hidden) const;

 private:
  void copy_indices_to(at::Device device);
  at::Tensor attend_gathered(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                             int64_t window, const AttentionScoreOptions& scores) const;
  PagedKVCache* store_;
  std::vector<kernels::PagedSequence> sequences_;
  at::Tensor logit_rows_, pages_, slots_;   // int64; the page and the slot of each row
  std::vector<at::Tensor> sequence_pages_;  // int64, for gathering; on the device after the first layer's call
};

}  // namespace tessera::nn
