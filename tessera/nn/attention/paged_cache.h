// Keys and values of many sequences in pages that sequences may share, and the tokens of a forward over some of them.
//
//   PageStore store(layers, 1024);                                      // pages of kernels::kPageTokens tokens
//   PagedStep step(store, {{.first_row = 0, .rows = 5, .first_position = 0, .pages = first},
//                          {.first_row = 5, .rows = 1, .first_position = 40, .pages = second}}, /*logit_rows=*/{4, 5});
//   model.logits({.tokens = tokens, .positions = positions, .paged = &step});     // tokens [1, 6]: logits [1, 2, V]
//
// Which page belongs to whom is its user's business (models/generation). On the CPU in fp32 what a token gets depends
// on the tokens before it in its sequence alone, bit for bit (kernels/attention/paged_attention.h); elsewhere pages are
// gathered for each sequence. Not differentiable. One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/kernels/attention/paged_attention.h"

namespace tessera::nn {

struct AttentionScores;

class PageStore {
 public:
  PageStore(int64_t layers, int64_t pages) : layers_(static_cast<size_t>(layers)), pages_(pages) {}
  int64_t pages() const { return pages_; }

 private:
  friend class PagedStep;
  // Each [pages, 2, kv_heads, kernels::kPageTokens, head_dim], made at the layer's first use in the dtype and on the
  // device of those keys: a stage of a pipeline takes memory for its own layers. Pages that nobody wrote take no memory
  // where the system gives it at the first touch.
  std::vector<at::Tensor> layers_;
  int64_t pages_;
};

class PagedStep {
 public:
  // Rows follow one another in the order of the sequences; the pages of each reach its last token. logit_rows: the rows
  // whose logits are wanted.
  PagedStep(PageStore& store, std::vector<kernels::PagedTokens> sequences, std::vector<int64_t> logit_rows);

  // Puts keys and values [1, N, kv_heads, head_dim] into their places and gives what the queries [1, N, heads,
  // head_dim] make of all that they see: the same shape. Of DTensors each rank has the heads that lie on it, here and
  // in the store. Error kShape for keys unlike those that the layer has, and DTensors that cut anything but heads.
  at::Tensor attend(int64_t layer, const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                    int64_t window, const AttentionScores& scores);
  // The wanted rows of [1, N, width].
  at::Tensor wanted_rows(const at::Tensor& hidden) const;

 private:
  void bring_places_to(at::Device device);
  at::Tensor attend_gathered(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                             int64_t window, const AttentionScores& scores) const;
  PageStore* store_;
  std::vector<kernels::PagedTokens> sequences_;
  at::Tensor logit_rows_, pages_, slots_;   // int64; the latter two of each row
  std::vector<at::Tensor> sequence_pages_;  // int64, where they are gathered: on the device from the first layer on
};

}  // namespace tessera::nn
