// A linear head read a few rows at a time: what the loss and the log-probs of hidden states have in common.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera::kernels {

// The first of the labels (int64, of any shape) that is neither kIgnoredLabel nor one of the classes: its place in the
// flattened labels; -1: there is none. Waits for a device on which they lie.
int64_t first_wrong_label(const at::Tensor& labels, int64_t classes);

// The rows of a call whose label is not kIgnoredLabel.
class LabelledRows {
 public:
  explicit LabelledRows(const at::Tensor& labels);    // [N]
  at::Tensor of(const at::Tensor& values) const;      // [N, ...] -> those rows; the very tensor when all
  at::Tensor to_all(const at::Tensor& values) const;  // back to [N, ...]; 0 in the others

 private:
  at::Tensor kept_;
  int64_t count_;
};

struct RowChunk {
  int64_t begin, rows;
};
// Chunks of nearly equal size (a small rest would waste a product), of at most chunk_bytes at row_bytes a row but at
// least one row.
std::vector<RowChunk> row_chunks(int64_t rows, int64_t row_bytes, int64_t chunk_bytes);

// Caps logits in place: softcap * tanh(logits / softcap); 0: leaves them. Returns how fast each of them still follows
// what it was, where that is wanted and there is a cap.
at::Tensor cap_logits(at::Tensor& logits, double softcap, bool wants_slope);

// grad_weight [V, d] += gradient [rows, V]^T hidden [rows, d], block by block of the head's rows, so that no second
// tensor of the head's size is needed.
void add_head_gradient(const at::Tensor& grad_weight, const at::Tensor& gradient, const at::Tensor& hidden);

}  // namespace tessera::kernels
