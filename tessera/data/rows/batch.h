// Rows of token ids, ready for a model's forward.
//
//   Batch batch = make_batch(tokens, labels, positions, document_ids);     // int64 [rows, T] each
//   loss = model({.tokens = batch.tokens, .positions = batch.positions, .document_ids = batch.document_ids, .labels =
//   batch.labels});
//
// A plain value. Copies share the tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::data {

constexpr int64_t kPadding = -1;  // the document id of padding

struct Batch {
  at::Tensor tokens;         // int64 [rows, T]
  at::Tensor labels;         // int64 [rows, T]: the next token of the same document, or -100 where there is no loss
  at::Tensor positions;      // int64 [rows, T], from 0 in each document
  at::Tensor document_ids;   // int64 [rows, T]: 0, 1, ... within a row; kPadding after the last document
  int64_t label_tokens = 0;  // number of labels that are not -100
  int64_t tokens_used = 0;   // number of tokens that are not padding
};

// Makes a batch and counts label_tokens and tokens_used. Error kShape for tensors that are not int64 of one [rows, T].
Batch make_batch(at::Tensor tokens, at::Tensor labels, at::Tensor positions, at::Tensor document_ids);

}  // namespace tessera::data
